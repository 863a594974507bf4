"""Advantages, loss, gradient and metrics of GRPO equal those of TRL's trainer on the same recorded completions."""

import pytest
import torch
from datasets import Dataset
from pydantic import ValidationError
from trl import GRPOConfig as TrlConfig

from stages.data.batch import IGNORED, Batch, Documents, Rollouts
from stages.kinds.train.methods.grpo import GrpoConfig, GrpoLoss, group_advantages
from tests.unit.stages.kinds.train.methods.against_trl import (
    ARGUMENTS,
    gradient,
    log_probabilities,
    make_model,
    make_tokenizer,
    packed,
)

NUM_GENERATIONS, END = 4, 0
PROMPTS = [[1, 2, 3], [30]]
COMPLETIONS = [[4, 5, 6, END], [7, END], [8, 9], [10, 11, 12, 13, END], [14, END], [15, 16, END], [17], [18, END]]
"""Recorded completions as token ids, `NUM_GENERATIONS` of each prompt; those without an end token were cut off."""
REWARDS = [1.0, 0.0, 0.25, 1.0, 0.5, None, 0.0, 1.0]
"""Rewards of the recorded completions; None stands for one that could not be scored."""
SERVER_NOISE, DRIFT = 0.3, 0.05
"""Standard deviations of the server's log-probabilities' noise, and of weights' change since sampling."""
NAMES_OF_TRL = {
    "kl": "kl",
    "clipped_low_fraction": "clip_ratio/low_mean",
    "clipped_high_fraction": "clip_ratio/high_mean",
    "server_difference": "sampling/sampling_logp_difference/mean",
    "importance_weight": "sampling/importance_sampling_ratio/mean",
}
TRL_DEFAULT = {"importance_sampling_mode": "sequence_mask"}
NOT_IN_TRL = {"apply_chat_template", "max_draws", "reference", "rewards", "server", "serving", "stop", "system"} | {
    "advantage",
    "asynchronous",
    "data_parallel_size",
    "environment",
    "environments",
    "placement",
    "replay_experts",
}
RLOO = {"advantage": "leave_one_out", "importance_sampling_level": "product", "loss_type": "grpo"}
COMBINATIONS = [
    {},
    TRL_DEFAULT,
    {"loss_type": "grpo"},
    {"loss_type": "bnpo", "epsilon": 0.02, "epsilon_high": 0.05},
    {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 7},
    {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True, "scale_rewards": "batch"},
    {"loss_type": "grpo", "beta": 0.04, "mask_truncated_completions": True},
    {"loss_type": "bnpo", "beta": 0.5, "use_bias_correction_kl": False, "epsilon": 0.01},
    {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.003, "epsilon_high": 0.004},
    {"importance_sampling_level": "sequence", "beta": 0.1, "epsilon": 0.003, "mask_truncated_completions": True},
    *(
        {"importance_sampling_mode": f"{level}_{how}", "importance_sampling_clip_max": 1.1}
        for level in ("token", "sequence")
        for how in ("truncate", "mask")
    ),
    {"importance_sampling_correction": False, "loss_type": "dr_grpo", "num_iterations": 2},
    {"loss_type": "cispo", "epsilon_high": 1.01, "scale_rewards": "batch"},
    {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.04, "mask_truncated_completions": True},
]


def make_trainer(folder, config):
    """Return TRL's GRPO trainer on the recorded completions, with a server's slightly different log-probabilities."""
    from trl import GRPOTrainer  # which imports MLflow: a second that each pytest worker would take to collect tests

    names = set(GrpoConfig.model_fields) & set(TrlConfig.__dataclass_fields__) - {"num_generations"}
    arguments = TrlConfig(
        output_dir=str(folder),
        **ARGUMENTS | {"per_device_train_batch_size": len(COMPLETIONS)},
        **{name: getattr(config, name) for name in names},
        **{
            f"vllm_{name}": value
            for name, value in config
            if name.startswith("importance_sampling_") and "level" not in name
        },
        num_generations=NUM_GENERATIONS,
    )
    make_model(1).save_pretrained(folder / "reference")
    model = make_model(0)
    model.config._name_or_path = str(folder / "reference")  # where the trainer loads its reference from
    trainer = GRPOTrainer(
        model,
        lambda completion_ids, **_: REWARDS,
        arguments,
        train_dataset=Dataset.from_dict({"prompt": ["t1", "t2"]}),
        processing_class=make_tokenizer(),
        rollout_func=lambda prompts, trainer: {
            "prompt_ids": [prompt for prompt in PROMPTS for _ in range(NUM_GENERATIONS)],
            "completion_ids": COMPLETIONS,
            "logprobs": said_by_server(trainer.model),
        },
    )
    trainer.use_vllm, trainer._last_loaded_step = True, 0
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def said_by_server(model):
    """Return a sampling server's noisy log-probabilities for each completion's tokens, None for one token."""
    batch = make_batch(GrpoConfig())
    with torch.no_grad():
        values = log_probabilities(model, batch)[batch.signal.has_target]
    torch.manual_seed(5)
    said = (values + SERVER_NOISE * torch.randn(values.shape)).tolist()
    said[1] = None
    lengths = [len(completion) for completion in COMPLETIONS]
    return [[said.pop(0) for _ in range(length)] for length in lengths]


def make_batch(config) -> Batch:
    """Return the recorded completions, with their prompts, as one packed row."""
    texts = [PROMPTS[number // NUM_GENERATIONS] + answer for number, answer in enumerate(COMPLETIONS)]
    batch = packed(
        [torch.tensor(text) for text in texts],
        [torch.arange(len(text)) >= len(text) - len(answer) for text, answer in zip(texts, COMPLETIONS, strict=True)],
    )
    cut_off = torch.tensor([answer[-1] != END for answer in COMPLETIONS])
    if not config.mask_truncated_completions:
        return batch
    return batch.with_signal(targets=batch.signal.targets.where(~cut_off[batch.documents.ids], IGNORED))


def make_rollouts(config, batch, model, reference, advantages) -> Rollouts:
    everywhere = make_batch(GrpoConfig())
    server = torch.zeros(batch.signal.targets.shape)
    said = [value for values in said_by_server(model) for value in values]
    server[everywhere.signal.has_target] = torch.tensor([float("nan") if value is None else value for value in said])
    with torch.no_grad():
        return Rollouts(
            advantages,
            log_probabilities(model, batch),
            server.where(batch.signal.has_target, 0.0),
            log_probabilities(reference, batch) if config.beta else None,
        )


def cut(batch: Batch, documents: range) -> Batch:
    """Return a range of the documents in a packed row as a packed row of their own."""
    assert batch.signal.rollouts is not None
    of_documents = (batch.documents.ids >= documents.start) & (batch.documents.ids < documents.stop)

    def kept(values):
        return values if values is None else values[of_documents][None]

    rollouts = batch.signal.rollouts
    own = Documents(
        kept(batch.documents.ids) - documents.start,
        len(documents),
        [batch.documents.lengths[number] for number in documents],
    )
    return Batch.of(
        kept(batch.inputs.input_ids),
        kept(batch.signal.targets),
        kept(batch.inputs.position_ids),
        own,
        rollouts=Rollouts(
            rollouts.advantages[documents.start : documents.stop],
            kept(rollouts.old_log_probabilities),
            kept(rollouts.server_log_probabilities),
            kept(rollouts.reference_log_probabilities),
        ),
    )


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_grpo_and_its_relatives(tmp_path, fields):
    config = GrpoConfig(**fields)
    trainer = make_trainer(tmp_path, config)
    recorded = trainer._generate_and_score_completions([{"prompt": "t1"}] * len(COMPLETIONS))
    rewards = torch.tensor([float("nan") if reward is None else reward for reward in REWARDS])
    advantages = group_advantages(rewards, NUM_GENERATIONS, config.scale_rewards)
    torch.testing.assert_close(advantages, recorded["advantages"], rtol=1e-5, atol=1e-6)

    batch = make_batch(config)
    batch = batch.with_signal(rollouts=make_rollouts(config, batch, trainer.model, make_model(1), advantages))
    torch.manual_seed(7)
    for weight in trainer.model.parameters():
        weight.data += DRIFT * torch.randn(weight.shape)
    expected = trainer.compute_loss(trainer.model, recorded)
    expected_gradient = gradient(trainer.model, expected)
    assert expected_gradient.norm() > 0
    loss = GrpoLoss(config)
    shares = [cut(batch, range(5)), cut(batch, range(5, len(COMPLETIONS)))]
    counts = [loss.counts(share.signal) for share in shares]
    totals = {name: sum(one[name] for one in counts) for name in counts[0]}
    assert totals == loss.counts(batch.signal)
    for parts in ([batch], shares):
        results = [loss(log_probabilities(trainer.model, part), part.signal, totals) for part in parts]
        found = sum(result for result, _ in results)
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        assert (gradient(trainer.model, found) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
        metrics = {name: sum(metrics[name].item() for _, metrics in results) for name in loss.metric_names}
        logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        if config.loss_type == "cispo":
            logged["clip_ratio/high_mean"] = logged["cispo_clip_ratio"]
        ours = {NAMES_OF_TRL[name]: value for name, value in metrics.items() if name in NAMES_OF_TRL}
        shared = {name for name in ours if name in logged}
        assert {name: ours[name] for name in shared} == pytest.approx(
            {name: logged[name] for name in shared}, rel=1e-5, abs=1e-6
        )
    if config.epsilon < 0.2 or config.epsilon_high == 1.01:
        assert metrics["clipped_low_fraction"] + metrics["clipped_high_fraction"] > 0, "or nothing is compared"


def test_rloo(tmp_path, monkeypatch):
    """TRL has a trainer of its own for it, which samples by itself: here it gets the recorded completions instead."""
    from trl import RLOOConfig, RLOOTrainer

    arguments = {**ARGUMENTS, "per_device_train_batch_size": len(COMPLETIONS), "num_generations": NUM_GENERATIONS}
    trainer = RLOOTrainer(
        make_model(0),
        lambda completion_ids, **_: REWARDS,
        RLOOConfig(output_dir=str(tmp_path), beta=0.0, epsilon=0.02, **arguments),
        train_dataset=Dataset.from_dict({"prompt": ["t1", "t2"]}),
        processing_class=make_tokenizer(),
    )
    prompts = [prompt for prompt in PROMPTS for _ in range(NUM_GENERATIONS)]
    monkeypatch.setattr(trainer, "_generate", lambda _: (prompts, COMPLETIONS, [""] * len(COMPLETIONS)))
    recorded = trainer._generate_and_score_completions([{"prompt": "t1"}] * len(COMPLETIONS))
    config = GrpoConfig(**RLOO, epsilon=0.02, importance_sampling_correction=False)
    rewards = torch.tensor([float("nan") if reward is None else reward for reward in REWARDS])
    advantages = config.model_copy(update={"num_generations": NUM_GENERATIONS}).advantages(rewards)
    torch.testing.assert_close(advantages, recorded["advantages"], rtol=1e-5, atol=1e-6)

    batch = make_batch(config)
    batch = batch.with_signal(rollouts=make_rollouts(config, batch, trainer.model, None, advantages))
    torch.manual_seed(7)
    for weight in trainer.model.parameters():
        weight.data += DRIFT * torch.randn(weight.shape)
    expected = trainer.compute_loss(trainer.model, recorded)
    expected_gradient = gradient(trainer.model, expected)
    loss = GrpoLoss(config)
    found, metrics = loss(log_probabilities(trainer.model, batch), batch.signal, loss.counts(batch.signal))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (gradient(trainer.model, found) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
    logged = {name: trainer._metrics["train"][f"clip_ratio/{name}_mean"][-1] for name in ("low", "high")}
    assert {name: metrics[f"clipped_{name}_fraction"].item() for name in logged} == pytest.approx(logged)
    assert sum(logged.values()) > 0, "or nothing is compared"


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_the_round():
    """REINFORCE++ (Hu et al. 2025, equation 7): (A - mean(A)) / std(A) of the batch, without a group's baseline."""
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    advantages = GrpoConfig(advantage="batch_whitened", num_generations=4).advantages(rewards)
    torch.testing.assert_close(advantages, (rewards - rewards.mean()) / rewards.std(), rtol=1e-3, atol=0)
    assert advantages[4:].lt(0).all(), "a group of equal rewards is worse than the other"


def test_weights_above_the_cap_are_counted():
    batch = make_batch(GrpoConfig())
    server = torch.where(batch.signal.has_target, -1.0, 0.0)
    server[0, 2] = -3.0
    old = torch.where(batch.signal.has_target, -1.0, 0.0)
    batch = batch.with_signal(rollouts=Rollouts(torch.ones(batch.documents.count), old, server))
    loss = GrpoLoss(GrpoConfig())
    _, metrics = loss(old, batch.signal, loss.counts(batch.signal))
    num_tokens = sum(len(completion) for completion in COMPLETIONS)
    assert metrics["importance_cut_fraction"].item() == pytest.approx(1 / num_tokens)
    assert metrics["importance_weight"].item() == pytest.approx((num_tokens + 2) / num_tokens)
    assert metrics["server_difference"].item() == pytest.approx(2 / num_tokens)
    assert metrics["entropy"].item() == pytest.approx(1)
    assert metrics["kl"].isnan()


def test_rollouts_go_where_their_batch_goes():
    batch = make_batch(GrpoConfig())
    rollouts = Rollouts(torch.ones(batch.documents.count), torch.zeros(batch.signal.targets.shape))
    moved = batch.with_signal(rollouts=rollouts).to("meta").signal.rollouts
    assert moved.advantages.is_meta
    assert moved.old_log_probabilities.is_meta
    assert moved.server_log_probabilities is None
    assert len(rollouts.without_documents().advantages) == 0


def test_a_batch_of_which_no_completion_may_be_learned_gives_nothing():
    batch = make_batch(GrpoConfig())
    nothing = torch.zeros(batch.signal.targets.shape)
    batch = batch.with_signal(
        targets=torch.full_like(batch.signal.targets, IGNORED),
        rollouts=Rollouts(torch.ones(batch.documents.count), nothing),
    )
    values = nothing.clone().requires_grad_()
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        loss = GrpoLoss(GrpoConfig(loss_type=loss_type))
        found, _ = loss(values, batch.signal, loss.counts(batch.signal))
        found.backward()
        assert found.item() == 0
        assert not values.grad.any()


def test_defaults_are_those_of_trl(tmp_path):
    theirs = TrlConfig(output_dir=str(tmp_path), **ARGUMENTS | {"per_device_train_batch_size": 8})
    names = {
        name: f"vllm_{name}" if name.startswith("importance_sampling_") and "level" not in name else name
        for name in GrpoConfig.model_fields.keys() - NOT_IN_TRL
    }
    found = {name: getattr(theirs, names[name]) for name in names}
    own = GrpoConfig().model_dump(include=set(names))
    assert {**own, **TRL_DEFAULT} == found, "but for what the description says"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"importance_sampling_correction": False, "importance_sampling_clip_max": 2.0},
            "`importance_sampling_clip_max` does",
        ),
        ({"loss_type": "cispo"}, "`epsilon_high`, which is None; set it to 1 or more"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "`epsilon_high`, which is 0.28"),
        ({"loss_type": "cispo", "epsilon_high": 5, "epsilon": 0.1}, "`epsilon` does nothing with `loss_type: cispo`"),
        ({"advantage": "leave_one_out", "scale_rewards": "none"}, "`scale_rewards` does nothing with `advantage: le"),
        ({"advantage": "batch_whitened", "max_draws": 3}, "groups of equal rewards, which do teach"),
        ({"use_bias_correction_kl": False}, "`use_bias_correction_kl` does nothing while `beta` is 0"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"epsilon": 1.5}, "less than 1"),
    ],
)
def test_options_that_would_do_nothing_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        GrpoConfig(**fields)
