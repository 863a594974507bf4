"""What a recipe says of rollouts that does not go together with the rest of its training stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stages.adapters.config import AdapterConfig
from stages.serving.adapters import NOT_PUT_ON_A_BASE
from stages.train.methods.rollouts import RolloutOptions

NOT_HELD_OUT = "completions have no held-out loss; evaluate what is trained in a stage of `kind: evaluate`"
NOT_PROMPTS = "completions are learned from, and prompts are not"
NAMED = "rows that are no prompts, or leave no room for a completion, are named, and nothing is trained"
IDLE_DATA = {
    "evaluation_split": NOT_HELD_OUT,
    "evaluation_fraction": NOT_HELD_OUT,
    "train_on": NOT_PROMPTS,
    "turns": NOT_PROMPTS,
    "format": "prompts are found in rows of any format",
    "special_tokens_in_content": "special tokens within prompts are text",
    "over_long": NAMED,
    "on_bad_rows": NAMED,
    "max_bad_row_fraction": NAMED,
}
"""Field of `data:` → why it does nothing."""


def idle_fields(method: str, *, has_rollouts: bool, asks_server: bool) -> Iterator[tuple[str, str]]:
    """Dotted path of each field that does nothing, and why; asks_server: about what a teacher says."""
    if has_rollouts:
        yield from ((f"data.{field}", why) for field, why in IDLE_DATA.items())
        return
    yield "execution.ready_timeout_s", f"`method: {method}` samples no completions"
    if not asks_server:
        for field in ("rollout_timeout_s", "concurrent_requests"):
            yield f"execution.{field}", f"`method: {method}` asks no server"


@dataclass(frozen=True)
class RolloutRun:
    """What else the recipe says. block: the field of the options."""

    block: str
    options: RolloutOptions
    global_batch_size: int
    sequence_length: int
    num_nodes: int
    engine: str
    needs_reference: bool
    adapter: AdapterConfig | None


def rollout_errors(run: RolloutRun) -> Iterator[str]:
    """What cannot be done, each with what to change."""
    if not run.options.rewards:
        yield f"`{run.block}.rewards` is missing, so that nothing says which completions are good; name at least one"
    yield from _sizes(run)
    if run.num_nodes > 1:
        yield "completions are sampled on one node; say `execution.nodes: 1`"
    if run.needs_reference and run.engine != "fsdp":
        yield (
            f"`{run.block}.beta` needs the model that training starts from beside the one that learns, which "
            "`engine: fsdp` alone can hold; choose it, or say `beta: 0`"
        )
    adapter = run.adapter
    if adapter is None:
        return
    if found := [field for field in NOT_PUT_ON_A_BASE if getattr(adapter, field, None)]:
        yield f"adapter.{found[0]}: no server samples from such an adapter; remove it"
    if adapter.changes_base or adapter.base_precision or adapter.stack:
        yield (
            "adapter: `init` that changes the base, `base_precision` and `stack` make the frozen model another than "
            f"the one that the server has; remove them, or let the model itself learn with `method: {run.block}`"
        )


def _sizes(run: RolloutRun) -> Iterator[str]:
    block, options, serving = run.block, run.options, run.options.serving
    if run.global_batch_size * options.steps_per_generation % options.num_generations:
        yield (
            f"global_batch_size {run.global_batch_size} × {block}.steps_per_generation {options.steps_per_generation} "
            f"completions are no whole groups of {block}.num_generations {options.num_generations}; make it a multiple"
        )
    if serving.max_num_seqs and options.num_generations > serving.max_num_seqs:
        yield (
            f"{block}.num_generations: {options.num_generations} is more than the {serving.max_num_seqs} requests that "
            f"the server takes at a time; raise {block}.serving.max_num_seqs, or lower it"
        )
    for field, most in (
        ("data.sequence_length", run.sequence_length),
        (f"{block}.serving.max_model_len", serving.max_model_len),
    ):
        if most and options.max_completion_length >= most:
            yield (
                f"{block}.max_completion_length: is {options.max_completion_length}, which leaves no room for a prompt "
                f"in {field}, {most}; lower it, or raise that"
            )
