"""What a recipe says of rollouts that does not go together with the rest of its training stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stages.adapters.config import AdapterConfig
from stages.data.config import DataConfig
from stages.kinds.train.methods.method import TeacherServer
from stages.kinds.train.methods.rollouts import RolloutOptions, SamplingOptions
from stages.serving.adapters import NOT_PUT_ON_A_BASE
from stages.serving.config import ServingConfig
from stages.serving.registry import chosen_engine

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
OF_OWN_SERVERS = [field for field in ServingConfig.model_fields if field not in ("dtype", "max_model_len")]
"""Fields of `serving:` that say how to start one; the others also say what is expected of one that runs already."""


def idle_fields(
    method: str,
    block: str,
    rollouts: RolloutOptions | None,
    sampling: SamplingOptions | None,
    server: TeacherServer | None,
) -> Iterator[tuple[str, str]]:
    """Dotted path of each field that does nothing, and why. block: the field that holds `sampling`."""
    if rollouts:
        yield from ((f"data.{field}", why) for field, why in IDLE_DATA.items())
    if sampling and sampling.server:
        why = f"`{block}.server` was started by others"
        yield from ((f"{block}.serving.{field}", why) for field in OF_OWN_SERVERS)
    if not sampling:
        yield "execution.ready_timeout_s", f"`method: {method}` samples no completions"
    if not (sampling or server):
        for field in ("rollout_timeout_s", "concurrent_requests"):
            yield f"execution.{field}", f"`method: {method}` asks no server"


@dataclass(frozen=True)
class SamplingRun:
    """What else the recipe says. block: the field that holds `options`. teacher: the stage whose model it is."""

    method: str
    block: str
    options: SamplingOptions
    global_batch_size: int
    data: DataConfig
    num_nodes: int
    engine: str
    adapter: AdapterConfig | None
    needs_reference: bool
    teacher: str | None


def completion_errors(run: SamplingRun) -> Iterator[str]:
    """What cannot be done, each with what to change."""
    if isinstance(run.options, RolloutOptions):
        yield from _judged(run, run.options)
    else:
        yield from _taught(run)
    for field, most in (
        ("data.sequence_length", run.data.sequence_length),
        (f"{run.block}.serving.max_model_len", run.options.serving.max_model_len),
    ):
        if most and run.options.max_completion_length >= most:
            yield (
                f"{run.block}.max_completion_length: is {run.options.max_completion_length}, which leaves no room for "
                f"a prompt in {field}, {most}; lower it, or raise that"
            )
    engine = chosen_engine(run.options.serving)
    if not engine.capabilities.new_weights:
        yield f"{run.block}.serving.engine: {engine.name} takes no new weights while it runs; say `engine: vllm`"
    if run.num_nodes > 1:
        yield "completions are sampled on one node; say `execution.nodes: 1`"
    if run.adapter:
        yield from _of_adapter(run, run.adapter)
    if run.adapter and run.options.server:
        yield (
            f"{run.block}.server: is given whole weights, and an adapter learns; remove it, and the stage starts a "
            "server that puts the adapter on its base, or remove `adapter`"
        )


def _of_adapter(run: SamplingRun, adapter: AdapterConfig) -> Iterator[str]:
    if found := [field for field in NOT_PUT_ON_A_BASE if getattr(adapter, field, None)]:
        yield f"adapter.{found[0]}: no server samples from such an adapter; remove it"
    if adapter.changes_base or adapter.base_precision or adapter.stack:
        yield (
            "adapter: `init` that changes the base, `base_precision` and `stack` make the frozen model another than "
            f"the one that the server has; remove them, or let the model itself learn with `method: {run.method}`"
        )


def _judged(run: SamplingRun, options: RolloutOptions) -> Iterator[str]:
    block, serving = run.block, options.serving
    if not options.rewards:
        yield f"`{block}.rewards` is missing, so that nothing says which completions are good; name at least one"
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
    if run.needs_reference and run.engine != "fsdp":
        yield (
            f"`{block}.beta` needs the model that training starts from beside the one that learns, which "
            "`engine: fsdp` alone can hold; choose it, or say `beta: 0`"
        )


def _taught(run: SamplingRun) -> Iterator[str]:
    """Of answers that a teacher is asked about."""
    method = run.method
    if run.data.train_on == "all":
        yield f"`data.train_on: all` leaves no prompts that `{method}.lmbda` could answer; remove one of them"
    if run.teacher and run.engine != "fsdp":
        yield (
            f"`{method}.lmbda` needs the teacher beside the model that learns, which `engine: fsdp` alone can hold; "
            f"choose it, or name a server (`{method}.teacher_server`)"
        )
