"""Documentation table of the metrics and parameters that training and layout comparisons log to MLflow.

`flows/compare/README.md` shows it; a test checks that page and real logs against it.
"""

from stages.kinds.train.methods.registry import METHODS, metric_meanings
from stages.parallel.layout import ENGINES


def loss_meaning() -> str:
    """Return the documentation's text on the metric `loss`, whose meaning depends on the training method."""
    names: dict[str, list[str]] = {}
    for method in METHODS.values():
        names.setdefault(method.averaged_over, []).append(method.name.upper())
    usual = METHODS["sft"].averaged_over
    exceptions = "; ".join(f"{', '.join(names[what])}: over {what}" for what in names if what != usual)
    return f"mean over the {usual} of a global batch, in nats ({exceptions})"


STEP_METRICS = {
    "loss": loss_meaning(),
    "learning_rate": "of this step",
    "grad_norm": "global, before clipping",
    "step_time_s": "wall time of an optimizer step, waiting for data included",
    "tokens_per_s": "positions that went through the model, padding included, over all devices",
    "tokens_per_s_per_device": "the same, over the number of devices",
    "real_tokens_per_s": "without padding",
    "real_tokens_per_s_per_device": "the same, over the number of devices",
    "mfu": "model FLOPs over what the devices could do at their peak (CPU: measured matrix rate)",
    "data_wait_fraction": "share of the step spent waiting for data",
    "communication_fraction": "share of a profiled step in which a collective was in flight",
    "aux_loss": "with `moe.aux_loss_coefficient`: the loss that balances experts, before it is multiplied and added",
    "mtp_loss": "with `mtp_loss_weight`: cross-entropy of the token after the next, before it is multiplied and added",
    "pipeline_bubble_fraction": "share of the step in which a pipeline stage has nothing to do, mean over stages",
    "peak_memory_gib": "most memory held since the model was read; at the end: of the process that needed most",
    **metric_meanings(),
}
RUN_METRICS = {
    "evaluation_NAME": "the metric NAME over the held-out rows",
    "NAME_median": "the median over an attempt's steps, without the first ones, of a metric that every step has",
    "num_rows": "packed rows of the training data",
    "num_documents": "documents in them",
    "num_tokens": "tokens of the documents",
    "num_target_tokens": "tokens that carry loss",
    "padding_fraction": "share of positions that are padding",
    "export_difference": "mean |Δ log-probability| between the engine and Transformers with its export, in nats",
    "stage_time_s": "wall time of the stage, start and export included",
    "predicted_step_time_s": "the planner's step time for this layout on this hardware",
    "predicted_memory_gib": "the planner's peak memory of the process that needs most",
    "predicted_teacher_memory_gib": "the planner's peak memory of a teacher that is a stage's model, while it is asked",
    "predicted_pipeline_bubble_fraction": "the planner's bubble",
}
COMPARISON_METRICS = {
    "peak_memory_gib_rank_N": "peak memory of the process of rank N",
    "step_time_iqr_s": "interquartile range of the step time over all measured steps of all rounds",
    "relative_tokens_per_s": "tokens/s over those of the first layout",
    "loss_difference": "loss after the last step minus the first layout's, on the same batches",
}
METRICS = {**STEP_METRICS, **RUN_METRICS, **COMPARISON_METRICS}
PARAMS = {
    "engine": " or ".join(ENGINES),
    "layout.FIELD": "every field of the layout: dp_replicate, dp_shard, tp, pp, vpp, cp, ep, etp, micro_batch_size, …",
    "global_batch_size": "packed rows of an optimizer step; and so on for every field of the stage's config",
    "num_devices": "comparison: processes, each with its device",
    "measured_steps": "comparison: steps of a round that count",
    "measured_warmup_steps": "comparison: steps before them",
    "measured_rounds": "comparison: how often each layout was run",
}
TAGS = {
    "hardware": "the machine: `8 × NVIDIA H100 80GB HBM3`",
    "git_commit": "of this code",
    "stage": "name of the stage in the recipe",
    "version": "of the artifact that the stage builds, or would build",
    "layout": "the layout in one line",
    "upstream.FIELD": "version of the artifact that FIELD refers to",
    "comparison": "the comparison that the run belongs to",
}
SECTIONS = {"metric": METRICS, "parameter": PARAMS, "tag": TAGS}


def markdown_table() -> str:
    """Return the table of metric names in Markdown, for the documentation page."""
    lines = ["| name | is a | meaning |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {section} | {meaning} |"
        for section, names in SECTIONS.items()
        for name, meaning in names.items()
    ]
    return "\n".join(lines)
