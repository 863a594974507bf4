"""Group-relative policy optimization: of a prompt's completions, those with a higher reward become likelier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from stages.core.fields import AddedLater, NonNegativeFp32, PositiveFp32
from stages.kinds.train.methods.method import Method
from stages.kinds.train.methods.rollouts import RolloutOptions

if TYPE_CHECKING:
    from torch import Tensor

    from stages.data.batch import Signal
    from stages.engines.loss import Counts, Parts, Totals

ScaleRewards = Literal["group", "batch", "none"]
AdvantageKind = Literal["group", "leave_one_out", "batch_whitened"]
ADDED_TO_DEVIATION = 1e-4
"""Number added to a standard deviation of rewards before dividing by it, as in TRL."""

METRICS = {
    "kl": "estimated divergence from the reference model, in nats",
    "entropy": "estimated entropy of a token: the mean -log π of those that were sampled, in nats",
    "clipped_low_fraction": "share that was clipped since the model gives bad completions less than 1 - ε",
    "clipped_high_fraction": "share that was clipped since the model gives good completions more than 1 + ε",
    "server_difference": "mean |Δ log-probability| between the server and the engine that trains, in nats",
    "importance_weight": "mean weight that makes up for that difference",
    "importance_cut_fraction": "share of those weights that were above `importance_sampling_clip_max`",
}


class GrpoConfig(RolloutOptions):
    """Options of group-relative policy optimization (Shao et al. 2024) and its variants, named as in TRL."""

    beta: NonNegativeFp32 = Field(
        0.0,
        description="Weight of the divergence from the start model. 0, as in TRL, needs no reference model; the paper "
        "and ms-swift have 0.04, DeepSeek-R1 0.001.",
    )
    use_bias_correction_kl: bool = Field(
        True, description="Weigh the divergence by π/π_old, so that its gradient is that of the reverse KL."
    )
    epsilon: NonNegativeFp32 = Field(
        0.2, lt=1, description="Lower clip range ε: the probability ratio π/π_old is clipped at 1 - ε."
    )
    epsilon_high: NonNegativeFp32 | None = Field(
        None,
        description="Upper clip range: π/π_old is clipped at 1 + `epsilon_high`; default: `epsilon`. DAPO has 0.28. "
        "With `loss_type: cispo` the largest π/π_old itself; ScaleRL has 5.",
    )
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = Field(
        "dapo",
        description="Averaging of the loss. grpo: mean over completions of each one's mean over tokens; dapo and "
        "bnpo: mean over all tokens of the global batch (TRL's bnpo: of a micro-batch); dr_grpo: sum over "
        "tokens divided by `max_completion_length`. cispo (MiniMax-M1): as dapo, but every token's log-probability is "
        "learned, weighted by π/π_old up to `epsilon_high`.",
    )
    importance_sampling_level: Literal["token", "sequence", "product"] = Field(
        "token",
        description="Unit of the probability ratio π/π_old: each token, or a completion by its tokens' geometric mean "
        "(sequence, GSPO) or product (RLOO).",
    )
    advantage: Annotated[AdvantageKind, AddedLater()] = Field(
        "group",
        description="Baseline of a completion's reward. group: mean of its prompt's rewards. leave_one_out: mean of "
        "its prompt's other completions (RLOO). batch_whitened: mean of the whole sampling, divided by its standard "
        "deviation (REINFORCE++).",
    )
    scale_rewards: ScaleRewards = Field(
        "group",
        description="Divisor of advantages: standard deviation of the group's or batch's rewards, or none (Dr. GRPO).",
    )
    importance_sampling_correction: bool = Field(
        True,
        description="Weight the loss by the trainer's probability over the sampling server's, to correct for their "
        "differences.",
    )
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        "token_truncate",
        description="Unit of the importance weights between server and trainer, and treatment of weights above "
        "`importance_sampling_clip_max`: truncate sets them to it, mask to 0. TRL has sequence_mask, "
        "which drops many long completions in bf16; verl truncates tokens.",
    )
    importance_sampling_clip_max: PositiveFp32 = Field(
        3.0, description="Largest importance weight between server and trainer; verl has 2."
    )

    def advantages(self, rewards: Tensor) -> Tensor:
        if self.advantage == "group":
            return group_advantages(rewards, self.num_generations, self.scale_rewards)
        if self.advantage == "leave_one_out":
            return leave_one_out_advantages(rewards, self.num_generations)
        return group_advantages(rewards, len(rewards), "batch")

    @model_validator(mode="after")
    def _options_that_do_something(self) -> Self:
        if not self.importance_sampling_correction or self.asynchronous.lag:
            why = "with `asynchronous.lag`" if self.asynchronous.lag else "without `importance_sampling_correction`"
            for name in ("importance_sampling_mode", "importance_sampling_clip_max"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"`{name}` does nothing {why}; remove it")
        if not self.beta and not self.use_bias_correction_kl:
            raise ValueError("`use_bias_correction_kl` does nothing while `beta` is 0; remove it")
        if self.advantage != "group" and self.scale_rewards != "group":
            raise ValueError(f"`scale_rewards` does nothing with `advantage: {self.advantage}`; remove it")
        if self.advantage == "batch_whitened" and self.max_draws > 1:
            raise ValueError(
                "`max_draws` replaces groups of equal rewards, which do teach with `advantage: batch_whitened`; "
                "remove it"
            )
        if self.loss_type == "cispo":
            if self.epsilon != type(self).model_fields["epsilon"].default:
                raise ValueError("`epsilon` does nothing with `loss_type: cispo`, which has no lower clip; remove it")
            if self.epsilon_high is None or self.epsilon_high < 1:
                raise ValueError(
                    f"`loss_type: cispo` weighs tokens by π/π_old up to `epsilon_high`, which is {self.epsilon_high}; "
                    "set it to 1 or more (ScaleRL: 5)"
                )
        return self

    @model_validator(mode="after")
    def _rewards_are_of_one_environment(self) -> Self:
        for name, value in (("advantage", "batch_whitened"), ("scale_rewards", "batch")):
            if len(self.environments) > 1 and getattr(self, name) == value:
                raise ValueError(
                    f"`{name}: {value}` compares rewards of different environments; say another `{name}`, which stays "
                    "within a prompt"
                )
        return self


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: ScaleRewards) -> Tensor:
    """Return completions' advantages: reward minus the group's mean, over a standard deviation; float32 [completions].

    One without a reward (NaN) counts in no mean, and has advantage 0. Shao et al. 2024, section 4.1.2.
    """
    groups = rewards.view(-1, num_generations)  # [groups, completions of a prompt]
    advantages = groups - groups.nanmean(1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (_deviation(groups) + ADDED_TO_DEVIATION)
    if scale_rewards == "batch":
        # one deviation for the whole round, [1, 1]
        advantages = advantages / (_deviation(rewards.view(1, -1)) + ADDED_TO_DEVIATION)
    # NaN is a completion without a reward: advantage 0, so that it contributes no gradient.
    return advantages.flatten().nan_to_num(nan=0.0)


def leave_one_out_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """Return completions' advantages: reward minus the mean of the group's others; float32 [completions].

    One without a reward (NaN) counts in no mean, and has advantage 0, as has one alone. Ahmadian et al. 2024, equation
    8: r_i - Σ_{j≠i} r_j / (n - 1) = (r_i - mean) n / (n - 1).
    """
    groups = rewards.view(-1, num_generations)  # [groups, completions of a prompt]
    numbers = (~groups.isnan()).sum(1, keepdim=True)
    differences = groups - groups.nanmean(1, keepdim=True)
    return (differences * numbers / (numbers - 1).clamp(min=1)).flatten().nan_to_num(nan=0.0)


def _deviation(groups: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each row, ignoring NaN, [groups, 1]; 0 for a row of one number."""
    numbers = (~groups.isnan()).sum(1, keepdim=True)
    squares = (groups - groups.nanmean(1, keepdim=True)).square().nansum(1, keepdim=True)
    # Unbiased (n - 1); the clamp is for a row of one number: 0 / 1, not 0 / 0.
    return (squares / (numbers - 1).clamp(min=1)).sqrt()


@dataclass(frozen=True)
class GrpoLoss:
    """GRPO's loss -min(w A, clip(w, 1 - ε, 1 + ε_high) A) + β KL, with w = π/π_old and advantage A.

    Shao et al. 2024, equation 3. Averages: Yu et al. 2025 (dapo), Liu et al. 2025 (dr_grpo); w of sequences: Zheng et
    al. 2025 (GSPO), equation 7; correction by the server's own probabilities: Yao et al. 2025. `loss_type: cispo` has
    -sg(min(w, ε_high)) A log π instead (MiniMax 2025, equation 4; sg stops the gradient).
    """

    config: GrpoConfig
    metric_names: ClassVar[tuple[str, ...]] = tuple(METRICS)

    def counts(self, signal: Signal) -> Counts:
        """Count what loss and metrics are averaged over: completions, tokens, and tokens with server probabilities."""
        assert signal.rollouts is not None
        served = signal.rollouts.server_log_probabilities
        return {
            "completions": signal.documents.count,
            "tokens": int(signal.has_target.sum()),
            "server tokens": 0 if served is None else int((signal.has_target & ~served.isnan()).sum()),
        }

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        assert signal.rollouts is not None
        ratios, advantages = self._ratios(token_log_probabilities, signal)
        lowest, highest = self._bounds
        clipped = ratios.clamp(lowest, highest)
        if self.config.loss_type == "cispo":
            losses = -_on_tokens(clipped.detach() * advantages, signal) * token_log_probabilities
        else:
            # The worse of the two: clipping only takes gain away; a ratio that moved the wrong way keeps its gradient.
            losses = _on_tokens(-(ratios * advantages).minimum(clipped * advantages), signal)
        weights, server_metrics = self._correction(signal, totals)
        if weights is not None:
            # before the divergence is added, which stays unweighted, as in TRL
            losses = losses * _on_tokens(weights, signal)
        divergences = self._divergences(token_log_probabilities, ratios, signal)
        losses = losses + self.config.beta * divergences if self.config.beta else losses
        metrics = {
            "kl": _mean(divergences.detach(), signal, totals),
            # Monte Carlo: the tokens were drawn from π_old, so this is unbiased only while the model is still π_old.
            "entropy": _mean(-token_log_probabilities.detach(), signal, totals),
            "clipped_low_fraction": _mean(((ratios < lowest) & (advantages < 0)).float(), signal, totals),
            "clipped_high_fraction": _mean(((ratios > highest) & (advantages > 0)).float(), signal, totals),
            **server_metrics,
        }
        return self._mean_loss(losses, signal, totals), metrics

    @property
    def _bounds(self) -> tuple[float, float]:
        config = self.config
        highest = config.epsilon if config.epsilon_high is None else config.epsilon_high
        return (0.0, highest) if config.loss_type == "cispo" else (1 - config.epsilon, 1 + highest)

    def _ratios(self, token_log_probabilities: Tensor, signal: Signal) -> tuple[Tensor, Tensor]:
        """Return ratios π/π_old and advantages: of tokens, [rows, sequence], or of completions [num_documents]."""
        assert signal.rollouts is not None
        advantages = signal.rollouts.advantages
        # 0 where there is no target (prompts, padding): a ratio of 1 there, and no gradient
        changes = (token_log_probabilities - signal.rollouts.old_log_probabilities).where(signal.has_target, 0.0)
        if self.config.importance_sampling_level == "token":
            return changes.exp(), signal.documents.of_tokens(advantages)
        of_completions = signal.documents.sums(changes)  # [documents]
        if self.config.importance_sampling_level == "sequence":
            # geometric mean of the tokens' ratios; their product leaves any clip range with the length
            of_completions = of_completions / _num_tokens(signal)
        return of_completions.exp(), advantages

    def _divergences(self, token_log_probabilities: Tensor, ratios: Tensor, signal: Signal) -> Tensor:
        """Return tokens' KL estimate π_ref/π - log π_ref/π - 1 (Schulman 2020), [rows, sequence]; else NaN."""
        assert signal.rollouts is not None
        reference = signal.rollouts.reference_log_probabilities
        if reference is None:
            return token_log_probabilities.new_full(token_log_probabilities.shape, float("nan"))
        changes = (reference - token_log_probabilities).where(signal.has_target, 0.0)
        # "k3": never negative, and 0 only where both models agree
        found = changes.exp() - changes - 1
        return found * _on_tokens(ratios, signal) if self.config.use_bias_correction_kl else found

    def _correction(self, signal: Signal, totals: Totals) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return importance weights against the server's probabilities (None: no correction), and their metrics."""
        config, rollouts = self.config, signal.rollouts
        assert rollouts is not None
        names = ("server_difference", "importance_weight", "importance_cut_fraction")
        nothing = {name: rollouts.advantages.new_tensor(float("nan")) for name in names}
        if rollouts.server_log_probabilities is None:
            return None, nothing
        # log π_old / π_server, both constants: the weights below scale the gradient and have none of their own
        differences = rollouts.old_log_probabilities - rollouts.server_log_probabilities
        # NaN where the server reported none: such a token counts as no difference.
        differences = differences.where(signal.has_target, 0.0).nan_to_num(nan=0.0)
        known = {**nothing, "server_difference": differences.abs().sum() / totals["server tokens"]}
        if not config.importance_sampling_correction:
            return None, known
        by_sequence = config.importance_sampling_mode.startswith("sequence")
        weights = (signal.documents.sums(differences) if by_sequence else differences).exp()
        is_cut = weights > config.importance_sampling_clip_max
        kept = weights.where(
            ~is_cut, config.importance_sampling_clip_max if config.importance_sampling_mode.endswith("truncate") else 0
        )
        known["importance_weight"] = _mean(kept, signal, totals)
        return kept, {**known, "importance_cut_fraction": _mean(is_cut.float(), signal, totals)}

    def _mean_loss(self, losses: Tensor, signal: Signal, totals: Totals) -> Tensor:
        """Return the micro-batch's contribution to the mean loss, from the losses of tokens [rows, sequence]."""
        of_completions = signal.documents.sums(losses.where(signal.has_target, 0.0))
        if self.config.loss_type == "grpo":
            return (of_completions / _num_tokens(signal)).sum() / totals["completions"]
        if self.config.loss_type == "dr_grpo":
            return of_completions.sum() / (totals["completions"] * self.config.max_completion_length)
        return of_completions.sum() / _divisor(totals)


def _divisor(totals: Totals) -> Tensor | float:
    """Return the global batch's number of target tokens; 1 if all its completions are masked: 0 / 0 would be NaN."""
    num_tokens = totals["tokens"]
    return num_tokens + (num_tokens == 0)


def _num_tokens(signal: Signal) -> Tensor:
    """Return each completion's number of target tokens, float32 [num_documents], at least 1 even if masked out."""
    return signal.documents.sums(signal.has_target.float()).clamp(min=1)


def _on_tokens(values: Tensor, signal: Signal) -> Tensor:
    """Spread one number per completion to its tokens, [rows, sequence]; values by token are returned unchanged."""
    return signal.documents.of_tokens(values) if values.dim() == 1 else values


def _mean(values: Tensor, signal: Signal, totals: Totals) -> Tensor:
    """Return the contribution to a mean over values of tokens [rows, sequence], or of completions [documents]."""
    if values.dim() == 1:
        return values.sum() / totals["completions"]
    return values.where(signal.has_target, 0.0).sum() / _divisor(totals)


GRPO = Method(
    name="grpo",
    rows="prompts",
    build_loss=GrpoLoss,
    options=GrpoConfig,
    needs_reference=lambda config: config.beta > 0,
    needs_rollouts=True,
    metrics=METRICS,
    usual_learning_rates=((0.01, 3e-4), (1e9, 1e-6)),
)
