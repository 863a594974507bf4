"""Promote stage: decides by the recipe's gates whether a candidate model becomes champion.

In: the artifacts that the recipe names, and `champion.json`. Out: `verdict.json` and `verdict.md`.
`flows/champion/promotion.py` moves the alias in MLflow's registry after the commit.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from stages.core.contract import StageContext, StageResult
from stages.core.files import write_atomically
from stages.core.intervals import NUM_CUT, zero_score_warning
from stages.kinds.promote.config import PromoteConfig
from stages.kinds.promote.judged_pairs import JudgedPairs, judged_pairs
from stages.kinds.promote.paired import Difference, compare, read_scores
from stages.kinds.promote.verdict import (
    CHAMPION_FILE,
    TABLE_FILE,
    VERDICT_FILE,
    Champion,
    ComparedChampion,
    Gate,
    Measurements,
    Outcome,
    Verdict,
    comparison_metrics,
    gate_sentence,
    judge,
    markdown,
)
from stages.models.model_folder import files_with_weights
from stages.models.recorded import PICTURE_PROMPTS
from stages.serving.engine import LAUNCH_FILE, LaunchSpec

MIB = 2**20
LOGPROB_DIFFERENCE = "max_abs_logprob_difference"
"""Name of the metric: largest difference between a model's log-probabilities and those recorded in its training."""
THROUGHPUT_PREFIX = "output_tokens_per_s_concurrency_"


def run(config: PromoteConfig, context: StageContext) -> StageResult:
    """Check the candidate against the gates, and write the decision to `verdict.json` and `verdict.md`.

    Raises EvaluationError if the two sides cannot be compared, or a gate needs what nothing measured.
    """
    standing = ComparedChampion.model_validate_json((context.work / CHAMPION_FILE).read_bytes())
    against, references = _opponent(config, context, standing.champion)
    compared = compare(_folders(context, config.evaluations), references) if against else []
    pairs = _pairs(config, context, standing.champion, references)
    differences = [*compared, *pairs.differences]
    measured = _measurements(config, context, differences, pairs)
    gates = judge(config.gates, measured)
    verdict = Verdict(
        outcome=_outcome(standing.champion, gates),
        name=config.name,
        champion_version=standing.champion.version if standing.champion else None,
        against=against,
        missed=tuple(gate_sentence(gate) for gate in gates if not gate.holds),
        warnings=tuple(_warnings(config, context, against, measured)),
        gates=tuple(gates),
        differences=tuple(differences),
    )
    write_atomically(context.work / VERDICT_FILE, verdict.model_dump_json(indent=2))
    write_atomically(context.work / TABLE_FILE, markdown(verdict) + "\n")
    for warning in verdict.warnings:
        context.warn(warning)
    context.milestone("; ".join([f"{config.name}: {verdict.outcome}", *verdict.missed]))
    metrics = {"gates_missed": float(len(verdict.missed)), "size_mib": measured.size_mib}
    return StageResult(
        metrics={**metrics, **pairs.metrics, **comparison_metrics(differences)},
        tags={"verdict": verdict.outcome, "registered_model": config.name},
        files=[TABLE_FILE, VERDICT_FILE],
    )


def _opponent(
    config: PromoteConfig, context: StageContext, champion: Champion | None
) -> tuple[str | None, Sequence[Path]]:
    """Return the name and evaluations of the candidate's opponent: the recipe's baselines, else the champion."""
    if config.baselines:
        return ", ".join(config.baselines), _folders(context, config.baselines)
    if champion is None or not config.compares:
        return None, ()
    if champion.same_model:
        return f"itself (version {champion.version})", _folders(context, config.evaluations)
    return f"champion (version {champion.version})", champion.evaluations


def _pairs(
    config: PromoteConfig, context: StageContext, champion: Champion | None, references: Sequence[Path]
) -> JudgedPairs:
    """Let an LLM judge compare both models' answers; empty if there is no other model, or it is the candidate."""
    is_same = bool(champion and champion.same_model and not config.baselines)
    if not config.pairs or not references or is_same:
        return JudgedPairs([], {})
    return judged_pairs(config.pairs, _folders(context, config.evaluations), references, context)


def _outcome(champion: Champion | None, gates: Sequence[Gate]) -> Outcome:
    if champion and champion.same_model:
        return "already champion"
    return "promoted" if all(gate.holds for gate in gates) else "not promoted"


def _warnings(
    config: PromoteConfig, context: StageContext, against: str | None, measured: Measurements
) -> Iterator[str]:
    """Yield warnings about a candidate that may be useless although all gates hold, such as scores of 0."""
    if against is None and not (config.gates.min_scores or config.gates.max_scores):
        scores = ", ".join(f"{name} {value:.4g}" for name, value in measured.scores.items() if "_stderr" not in name)
        yield (
            f"nothing asks for a score: no model to compare with, and neither gates.min_scores nor max_scores; {scores}"
        )
    for stage in config.evaluations:
        num_cut = int(_metrics(context, stage).get(NUM_CUT, 0))
        for name, score in read_scores(_folders(context, [stage])).items():
            if score.higher_is_better and not any(score.values.values()):
                yield zero_score_warning(name, stage, len(score.values), num_cut)


def _measurements(
    config: PromoteConfig, context: StageContext, differences: Sequence[Difference], pairs: JudgedPairs
) -> Measurements:
    scores = {name: value for stage in config.evaluations for name, value in _metrics(context, stage).items()}
    served = _metrics(context, config.server) if config.server else {}
    throughputs = [value for name, value in served.items() if name.startswith(THROUGHPUT_PREFIX)]
    made = _metrics(context, config.model)
    named = f"{LOGPROB_DIFFERENCE}{_end_of_names(config, context)}"
    from_training = [value for value in (made.get(LOGPROB_DIFFERENCE), served.get(named)) if value is not None]
    candidate = context.inputs[config.model]
    weights = [*files_with_weights(candidate / "model"), *files_with_weights(candidate / "adapter")]
    return Measurements(
        scores=scores,
        differences=differences,
        win_rates={rate.name: rate.candidate for rate in pairs.differences},
        size_mib=sum(file.stat().st_size for file in weights) / MIB,
        kl_nats_per_token=made.get("kl_nats_per_token"),
        max_abs_logprob_difference=max(from_training, default=None),
        output_tokens_per_s=max(throughputs, default=None),
        differing_picture_prompts=served.get(f"{PICTURE_PROMPTS}{_end_of_names(config, context)}"),
    )


def _end_of_names(config: PromoteConfig, context: StageContext) -> str:
    """Return the suffix of the candidate's metric names, empty unless it is one of several served adapters."""
    launch = context.inputs[config.server] / LAUNCH_FILE if config.server else None
    if launch is None or not launch.is_file():
        return ""
    asked = LaunchSpec.model_validate_json(launch.read_bytes()).served_name
    return "" if asked == config.model else f"_{config.model}"


def _metrics(context: StageContext, stage: str) -> dict[str, float]:
    return StageResult.model_validate_json((context.inputs[stage] / "result.json").read_bytes()).metrics


def _folders(context: StageContext, stages: Sequence[str]) -> list[Path]:
    return [context.inputs[stage] for stage in stages]
