"""Checks of a whole training config: options that an engine, a method or another option does not support.

Each function yields or returns sentences, with what to change. `TrainConfig` calls them when a recipe is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from stages.adapters.config import AdapterConfig
from stages.adapters.legality import adapter_errors
from stages.core.redaction import quoted
from stages.data.any_rows import not_to_be_mixed
from stages.data.config import METHODS_FOR, DataConfig
from stages.data.formats import COLUMN_NAMES, FORMATS
from stages.engines.settings import Fp8Recipe
from stages.kinds.train.blocks import LOW_PRECISION, MoeConfig, OptimizerConfig
from stages.kinds.train.methods.method import Method, TeacherServer
from stages.kinds.train.methods.rollouts import RolloutOptions, SamplingOptions
from stages.parallel.layout import EngineName, Layout
from stages.planner.workload import Precision
from stages.serving.config import ServingConfig
from stages.serving.registry import chosen_engine
from stages.serving.served_models import NOT_PUT_ON_A_BASE

NOT_HELD_OUT = "completions have no held-out loss; evaluate the trained model in a stage of `kind: evaluate`"
NOT_PROMPTS = "the loss is over completions only, not over prompts"
NAMED = "rows that are no prompts, or leave no room for a completion, are always an error"
IDLE_DATA = {
    "evaluation_split": NOT_HELD_OUT,
    "evaluation_fraction": NOT_HELD_OUT,
    "train_on": NOT_PROMPTS,
    "turns": NOT_PROMPTS,
    "format": "prompts are found in rows of any format",
    "special_tokens_in_content": "special tokens within prompts are read as text",
    "over_long": NAMED,
    "on_bad_rows": NAMED,
    "max_bad_row_fraction": NAMED,
}
"""Fields of `data:` without effect where completions are sampled, each with the reason."""
OF_OWN_SERVERS = [field for field in ServingConfig.model_fields if field not in ("dtype", "max_model_len")]
"""Fields of `serving:` that start a server; the others also describe a server that runs already."""


def engine_errors(
    engine: EngineName,
    layout: Layout,
    precision: Precision,
    fp8_recipe: Fp8Recipe,
    optimizer: OptimizerConfig,
    moe: MoeConfig,
    adapter: AdapterConfig | None,
) -> list[str]:
    """Return conflicts between engine, precision, optimizer, experts and adapter."""
    has_adapter = adapter is not None
    errors = list(adapter_errors(engine, adapter)) if adapter else []
    errors += optimizer_errors(optimizer, engine, layout, precision, has_adapter=has_adapter)
    errors += moe_errors(moe, has_adapter=has_adapter)
    if fp8_recipe != "tensorwise" and engine != "fsdp":
        errors.append(_needs_fsdp(f"fp8_recipe: {fp8_recipe}", engine, ", which has one scale a tensor"))
    return errors


def _needs_fsdp(option: str, engine: EngineName, why: str = "") -> str:
    """Return the error for an option that only FSDP2 supports."""
    return f"`{option}` needs `engine: fsdp`, found {engine}{why}; change either"


def optimizer_errors(
    optimizer: OptimizerConfig, engine: EngineName, layout: Layout, precision: Precision, *, has_adapter: bool
) -> list[str]:
    """Return conflicts of `optimizer` with other options."""
    if optimizer.name == "adamw":
        return list(_low_precision_errors(optimizer, engine, layout, precision, has_adapter))
    errors = []
    if engine != "fsdp":
        errors.append(_needs_fsdp(f"optimizer.name: {optimizer.name}", engine))
    if has_adapter:
        errors.append(
            f"`optimizer.name: {optimizer.name}` orthogonalises whole matrices, and an adapter has factors of them; "
            "remove `adapter`, or say `optimizer.name: adamw`"
        )
    if layout.cpu_offload:
        errors.append(
            f"`optimizer.name: {optimizer.name}` gathers matrices on the device, and `layout.cpu_offload` has them in "
            "host memory; change either"
        )
    return errors


def _low_precision_errors(
    optimizer: OptimizerConfig, engine: EngineName, layout: Layout, precision: Precision, has_adapter: bool
) -> Iterator[str]:
    """Yield conflicts of AdamW's low-precision options with other options."""
    default = OptimizerConfig()
    changed = [name for name in LOW_PRECISION if getattr(optimizer, name) != getattr(default, name)]
    if engine != "fsdp":
        for name in changed:
            yield _needs_fsdp(f"optimizer.{name}", engine, ", which has it with Transformer Engine's optimizer only")
    if not optimizer.bf16_stochastic_round:
        return
    if precision != "bf16":
        yield f"`optimizer.bf16_stochastic_round` needs `precision: bf16`, found {precision}; change either"
    if has_adapter:
        yield "`optimizer.bf16_stochastic_round` is for whole models, and an `adapter` learns in fp32; remove either"
    if layout.accumulate == "sharded":
        yield (
            "`optimizer.bf16_stochastic_round` keeps sharded gradients in bf16, and `layout.accumulate: sharded` would "
            "sum them in bf16; say `accumulate: whole`"
        )


def moe_errors(moe: MoeConfig, *, has_adapter: bool) -> Iterator[str]:
    """Yield conflicts of `moe` with other options."""
    if moe.freeze_router and has_adapter:
        yield (
            "`moe.freeze_router` has no effect with `adapter`, whose base is frozen; remove it, and leave routers out "
            "of the adapter by `adapter.exclude_modules`"
        )


def score_head_errors(method: str, engine: EngineName, adapter: AdapterConfig | None) -> list[str]:
    """Return what a method that trains a score head (a reward model) does not support."""
    errors = []
    if engine != "fsdp":
        errors.append(_needs_fsdp(f"method: {method}", engine, ", which has no score head here"))
    if adapter:
        errors.append(f"`method: {method}` trains whole models only; remove `adapter`")
    return errors


def row_errors(method: Method, data: DataConfig) -> Iterator[str]:
    """Yield conflicts between the method's kind of rows and the options of `data`."""
    if method.rows == "prompts" and data.datasets:
        yield f"`data.datasets` does not go with `method: {method.name}`, which reads prompts; name one `data.dataset`"
    stated = {name: part.format for name, part in zip(data.names, data.parts.values(), strict=True)}
    stated = {name: form for name, form in stated.items() if form != "auto"}
    if mixed := [*not_to_be_mixed(stated, method.rows)]:
        yield from (f"`data.datasets`, `method: {method.name}`: {problem}" for problem in mixed)
        return
    for place, part in data.parts.items():
        yield from _errors(method, part, place)


def _errors(method: Method, data: DataConfig, place: str) -> Iterator[str]:
    """Yield conflicts between the training method and one dataset of `data`."""
    if method.rows not in ("examples", "prompts") and data.train_on == "all":
        yield f"`{place}train_on: all` does not go with `method: {method.name}`, which compares answers; remove it"
    if method.rows != "examples" and data.packing == "cut":
        yield f"`data.packing: cut` does not go with `method: {method.name}`; remove it, or learn texts (`method: sft`)"
    for theirs, ours in data.columns.items():
        if ours not in COLUMN_NAMES:
            yield (
                f"`data.{place}columns`: {theirs} is to be read as {quoted(ours, 100)}, which no format has; expected "
                f"{', '.join(sorted(COLUMN_NAMES))}"
            )
    if twice := [ours for ours, count in Counter(data.columns.values()).items() if count > 1]:
        yield f"`data.{place}columns` reads several columns as {', '.join(twice)}; expected one each"
    suitable = [name for name, form in FORMATS.items() if form.rows == method.rows]
    if method.rows != "prompts" and data.format not in ("auto", *suitable):
        yield (
            f"`data.{place}format: {data.format}` has no rows for `method: {method.name}`; expected auto or "
            f"{' or '.join(suitable)}, or another method: {METHODS_FOR[FORMATS[data.format].rows]}"
        )


def contradiction(steps: int | None, warmup_steps: int, learning_rate: float, weight_decay: float) -> str | None:
    """Return the problem of numbers that are each allowed, but not together; None where there is none."""
    if steps is not None and warmup_steps > steps:
        return (
            f"`warmup_steps: {warmup_steps}` is more than `steps: {steps}`, so `learning_rate` would never be reached; "
            "lower it"
        )
    if weight_decay * learning_rate >= 1:
        return (
            f"`weight_decay: {weight_decay:g}` × `learning_rate: {learning_rate:g}` is the fraction by which a step "
            "shrinks each weight; expected less than 1"
        )
    return None


def idle_fields(
    method: str,
    block: str,
    rollouts: RolloutOptions | None,
    sampling: SamplingOptions | None,
    server: TeacherServer | None,
) -> Iterator[tuple[str, str]]:
    """Yield the dotted path of each field of rollouts and teachers without effect, and why.

    block: the field that holds `sampling`.
    """
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
    """A training stage that samples completions, as its checks need it.

    block: the field that holds `options`.
    teacher: the stage of the teacher's model, if there is one.
    """

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
    """Yield unsupported options of a stage that samples completions, each with what to change."""
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
        yield f"{run.block}.serving.engine: {engine.name} cannot load new weights while it runs; say `engine: vllm`"
    if run.num_nodes > 1:
        yield "completions are sampled on one node; say `execution.nodes: 1`"
    if run.adapter:
        yield from _of_adapter(run, run.adapter)
    if run.adapter and run.options.server:
        yield (
            f"{run.block}.server: takes whole weights only, and an adapter learns; remove it, so that the stage starts "
            "a server that loads adapters, or remove `adapter`"
        )


def _of_adapter(run: SamplingRun, adapter: AdapterConfig) -> Iterator[str]:
    """Yield adapter options with which no server can sample."""
    if unserved := [field for field in NOT_PUT_ON_A_BASE if getattr(adapter, field, None)]:
        yield f"adapter.{unserved[0]}: no server samples from such an adapter; remove it"
    if adapter.changes_base or adapter.base_precision or adapter.stack:
        yield (
            "adapter: `init` that changes the base, `base_precision` and `stack` make the frozen model different from "
            f"the server's; remove them, or train whole weights with `method: {run.method}`"
        )


def _judged(run: SamplingRun, options: RolloutOptions) -> Iterator[str]:
    """Yield conflicts of completions that rewards judge (GRPO)."""
    block, serving = run.block, options.serving
    if not options.rewards:
        yield f"`{block}.rewards` is missing, so that no completion is better than another; name at least one"
    if run.global_batch_size * options.steps_per_generation % options.num_generations:
        yield (
            f"global_batch_size {run.global_batch_size} × {block}.steps_per_generation {options.steps_per_generation} "
            f"completions do not divide into groups of {block}.num_generations {options.num_generations}; make it a "
            "multiple"
        )
    if serving.max_num_seqs and options.num_generations > serving.max_num_seqs:
        yield (
            f"{block}.num_generations: {options.num_generations} is more than the {serving.max_num_seqs} requests that "
            f"the server takes at a time; raise {block}.serving.max_num_seqs, or lower it"
        )
    if run.needs_reference and run.engine != "fsdp":
        yield (
            f"`{block}.beta` needs a second model, the reference, which only `engine: fsdp` can hold; choose it, or "
            "say `beta: 0`"
        )


def _taught(run: SamplingRun) -> Iterator[str]:
    """Yield conflicts of completions about which a teacher is asked (on-policy distillation)."""
    method = run.method
    if run.data.train_on == "all":
        yield f"`data.train_on: all` leaves no prompts for the completions of `{method}.lmbda`; remove one of them"
    if run.teacher and run.engine != "fsdp":
        yield (
            f"`{method}.lmbda` needs a second model, the teacher, which only `engine: fsdp` can hold; choose it, or "
            f"name a server (`{method}.teacher_server`)"
        )
