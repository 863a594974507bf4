"""Checks for conflicts between config fields of a training stage that are each allowed alone, and what to change."""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from stages.adapters.config import AdapterConfig
from stages.core.contract import StageConfig, base_of
from stages.core.redaction import quoted
from stages.data.any_rows import not_to_be_mixed
from stages.data.config import ROW_KINDS, DataConfig
from stages.data.formats import COLUMN_NAMES, FORMATS
from stages.kinds.train.fields import TrainFields
from stages.kinds.train.methods.method import Method
from stages.kinds.train.methods.rollouts import Acting, RolloutOptions, SamplingOptions
from stages.models.media import ModelPart
from stages.parallel.compiler import missing_compiler
from stages.parallel.device_types import unusable_gpus
from stages.parallel.engines.registry import RULES, engines_with
from stages.parallel.engines.rules import Features
from stages.parallel.layout import AutoLayout
from stages.parallel.legality import adapter_errors, feature_errors, refusals
from stages.planner.hardware import named_like
from stages.rollouts.environments.environment import unfit_options
from stages.serving.config import ServingConfig
from stages.serving.registry import chosen_engine
from stages.serving.served_models import NOT_PUT_ON_A_BASE

NOT_PROMPTS = "the loss is over completions only, not over prompts"
NAMED = "rows that are no prompts, or leave no room for a completion, are always an error"
IDLE_DATA = {
    "train_on": NOT_PROMPTS,
    "turns": NOT_PROMPTS,
    "format": "prompts are found in rows of any format",
    "special_tokens_in_content": "special tokens within prompts are read as text",
    "over_long": NAMED,
    "max_patches": "rows of completions are packed by tokens alone",
    "on_bad_rows": NAMED,
    "max_bad_row_fraction": NAMED,
}
"""Fields of `data:` that have no effect when training samples completions, each with the reason."""
OF_OWN_SERVERS = [field for field in ServingConfig.model_fields if field not in ("dtype", "max_model_len")]
"""Fields of `serving:` that have an effect only where the stage starts the sampling server itself."""
SAME = ("rank", "alpha", "use_rslora", "use_dora", "modules_to_save")
SAME_LAYERS = ("target_modules", "target_parameters", "exclude_modules", "layers_to_transform")
"""Adapter fields that choose the layers; like those in `SAME`, they must not change when an adapter is continued."""


def config_errors(config: TrainFields) -> Iterator[list[str]]:
    """Yield errors of conflicting config fields, a list per group; a group relies on those before it having none."""
    yield [*row_errors(config), *token_errors(config)]
    yield list(number_errors(config))
    yield list(completion_errors(config, config.sampling)) if config.sampling else []
    yield list(engine_errors(config))


def number_errors(config: TrainFields) -> Iterator[str]:
    """Yield the first error: warm-up exceeds the training, too large weight decay, `keep: best` lacks evaluations."""
    steps, warmup_steps = config.steps, config.warmup_steps
    if steps is not None and warmup_steps > steps:
        yield (
            f"`warmup_steps: {warmup_steps}` is more than `steps: {steps}`, so `learning_rate` would never be reached; "
            "lower it"
        )
    elif config.weight_decay * config.learning_rate >= 1:
        yield (
            f"`weight_decay: {config.weight_decay:g}` × `learning_rate: {config.learning_rate:g}` is the fraction by "
            "which a step shrinks each weight; expected less than 1"
        )
    elif config.keep == "best" and not (config.data.holds_out and config.execution.evaluate_every_steps):
        yield (
            "`keep: best` chooses by the held-out loss of several steps; name held-out rows "
            "(`data.evaluation_split` or `data.evaluation_fraction`) and `execution.evaluate_every_steps`"
        )


def token_errors(config: TrainFields) -> Iterator[str]:
    """Yield an error if an adapter is to learn new tokens: its base model keeps the tokens that it has."""
    if config.data.add_tokens and config.adapter:
        yield (
            "`data.add_tokens` does not go with `adapter`, whose base model keeps its embedding and its tokens; train "
            "all weights (remove `adapter`), or train the adapter on the model of such a stage"
        )


def row_errors(config: TrainFields) -> Iterator[str]:
    """Yield conflicts between the kind of rows that the method learns from and the options of `data`."""
    method, data = config.learning, config.data
    if data.add_tokens and not method.teaches_tokens:
        yield (
            f"`data.add_tokens` does not go with `method: {method.name}`, which would learn tokens that nothing knows; "
            "add them in a stage of `method: sft`, and train its model here"
        )
    without = [name for name, part in config.acting.items() if not _has_rows(part)]
    if not data.parts and any(without):
        yield (
            f"`{config.sampling_block}.environments.{without[0]}` has no prompts; say its `dataset: STAGE`, or "
            "`data.dataset` for all that have none"
        )
    elif not data.parts and (without or not config.acting):
        yield "`data` names no data; say `dataset: STAGE`, or several (`datasets`)"
    if data.dataset and config.acting and data.dataset not in {part.data.dataset for part in config.acting.values()}:
        yield f"`data.dataset: {data.dataset}` is read by no environment, as each has other rows; remove it"
    if twice := [token for token, count in Counter(data.add_tokens).items() if count > 1]:
        yield f"`data.add_tokens` names {quoted(twice[0], 100)} twice; expected each token once"
    if method.rows == "prompts" and data.datasets:
        yield f"`data.datasets` does not go with `method: {method.name}`, which reads prompts; name one `data.dataset`"
    stated = {name: part.format for name, part in zip(data.names, data.parts.values(), strict=True)}
    stated = {name: form for name, form in stated.items() if form != "auto"}
    if mixed := [*not_to_be_mixed(stated, method.rows)]:
        yield from (f"`data.datasets`, `method: {method.name}`: {problem}" for problem in mixed)
        return
    for place, part in data.parts.items():
        yield from _errors(method, part, place)


def _has_rows(part: Acting) -> bool:
    """Return whether an environment's prompts are there: of a dataset, or made by itself."""
    return bool(part.data.dataset or (part.options.environment and part.options.environment.makes_rows))


def _errors(method: Method, data: DataConfig, place: str) -> Iterator[str]:
    """Yield conflicts between the training method and the options of one dataset in `data`."""
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
            f"{' or '.join(suitable)}, or another method: {ROW_KINDS[FORMATS[data.format].rows].methods}"
        )


def completion_errors(config: TrainFields, options: SamplingOptions) -> Iterator[str]:
    """Yield options that do not work when training samples completions from the model."""
    block = config.sampling_block
    if isinstance(options, RolloutOptions):
        yield from _judged(config, options)
    else:
        yield from _teacher_problems(config)
    for field, most in (
        ("data.sequence_length", config.data.sequence_length),
        (f"{block}.serving.max_model_len", options.serving.max_model_len),
    ):
        if most and options.max_completion_length >= most:
            yield (
                f"{block}.max_completion_length: is {options.max_completion_length}, which leaves no room for a prompt "
                f"in {field}, {most}; lower it, or raise that"
            )
    engine = chosen_engine(options.serving)
    if not engine.capabilities.new_weights:
        yield f"{block}.serving.engine: {engine.name} cannot load new weights while it runs; say `engine: vllm`"
    if not options.server and options.is_colocated:
        yield from _of_shared_devices(config, options)
    if options.server and options.is_colocated:
        yield (
            f"{block}.placement: colocated is for a server that the stage starts, on the training's devices; "
            f"remove it, or {block}.server"
        )
    if config.execution.nodes > 1 and not options.server:
        yield (
            "the server that the stage starts samples on one node; say `execution.nodes: 1`, or start servers and name "
            f"them in `{block}.server`"
        )
    if config.adapter:
        yield from _of_adapter(config.method, config.adapter)


def _of_shared_devices(config: TrainFields, options: SamplingOptions) -> Iterator[str]:
    """Yield a problem of a sampling server that needs more devices than those that it shares with training."""
    num_devices = options.serving.tensor_parallel_size * options.copies(config.processes)
    if not isinstance(config.layout, AutoLayout) and num_devices > config.processes:
        yield (
            f"{config.sampling_block}.placement: colocated, and the server takes {num_devices} devices "
            "(serving.tensor_parallel_size × data_parallel_size), where "
            f"{config.processes} train{'s' * (config.processes == 1)}; lower these, or say `placement: separate`"
        )


def _of_adapter(method: str, adapter: AdapterConfig) -> Iterator[str]:
    """Yield adapter options with which no server can sample completions."""
    if unserved := [field for field in NOT_PUT_ON_A_BASE if getattr(adapter, field, None)]:
        yield f"adapter.{unserved[0]}: no server samples from such an adapter; remove it"
    if adapter.changes_base or adapter.base_precision or adapter.stack:
        yield (
            "adapter: `init` that changes the base, `base_precision` and `stack` make the frozen model different from "
            f"the server's; remove them, or train whole weights with `method: {method}`"
        )


def _judged(config: TrainFields, options: RolloutOptions) -> Iterator[str]:
    """Yield conflicts between GRPO's options of sampling, grouping and rewards."""
    block, serving = config.sampling_block, options.serving
    for name, part in config.acting.items():
        environment = part.options.environment
        if not part.data.dataset and config.data.evaluation_split:
            yield (
                f"`data.evaluation_split` is of a dataset, and `{block}.{part.field}` makes the rows; say "
                "`data.evaluation_fraction`"
            )
        if not part.options.rewards and not (environment and environment.gives_rewards):
            where = f"`{block}.{part.field}` has no rewards" if name else f"`{block}.rewards` is missing"
            yield f"{where}, so that no completion is better than another; name at least one"
    if options.acts:
        for option, why in unfit_options(options.stop, options.apply_chat_template, options.rewards):
            yield f"`{block}.{option}` {why}"
    if config.global_batch_size * options.steps_per_generation % options.num_generations:
        yield (
            f"global_batch_size {config.global_batch_size} × {block}.steps_per_generation "
            f"{options.steps_per_generation} completions do not divide into groups of {block}.num_generations "
            f"{options.num_generations}; make it a multiple"
        )
    if serving.max_num_seqs and options.num_generations > serving.max_num_seqs:
        yield (
            f"{block}.num_generations: {options.num_generations} is more than the {serving.max_num_seqs} requests that "
            f"the server takes at a time; raise {block}.serving.max_num_seqs, or lower it"
        )
    if options.asynchronous.lag:
        yield from _overlapped(block, options)
    if config.needs_reference and not RULES[config.engine].has("second_model"):
        yield (
            f"`{block}.beta` needs a second model, the reference, which only `engine: {engines_with('second_model')}` "
            "can hold; choose it, or say `beta: 0`"
        )


def _overlapped(block: str, options: RolloutOptions) -> Iterator[str]:
    """Yield options with which no round can be sampled while earlier ones are learned."""
    lag = f"{block}.asynchronous.lag: {options.asynchronous.lag}"
    if options.is_colocated:
        yield (
            f"{lag} samples while the model learns, and with `placement: colocated` the server sleeps then; say "
            "`placement: separate`, or lag: 0"
        )
    if options.top_p < 1:
        yield (
            f"{lag} learns from the server's own log-probabilities, which with {block}.top_p {options.top_p:g} are of "
            "the likeliest tokens alone; say `top_p: 1`, or lag: 0"
        )
    if options.replay_experts:
        yield (
            f"{lag} learns from rounds whose weights the engine no longer has, and with them what `replay_experts` "
            "replays; remove it, or say lag: 0"
        )


def _teacher_problems(config: TrainFields) -> Iterator[str]:
    """Yield conflicts of on-policy distillation's options, such as a missing teacher."""
    method = config.method
    if config.data.train_on == "all":
        yield f"`data.train_on: all` leaves no prompts for the completions of `{method}.lmbda`; remove one of them"
    if config.teacher and not RULES[config.engine].has("second_model"):
        yield (
            f"`{method}.lmbda` needs a second model, the teacher, which only `engine: {engines_with('second_model')}` "
            f"can hold; choose it, or name a server (`{method}.teacher_server`)"
        )


def engine_errors(config: TrainFields) -> Iterator[str]:
    """Yield conflicts of the engine with the training's options, and of these among each other."""
    if config.adapter:
        yield from adapter_errors(config.engine, config.adapter.used_options)
    yield from feature_errors(config.engine, config.features())
    if config.mtp_loss_weight and not config.learning.is_likelihood:
        yield (
            f"`mtp_loss_weight` does not go with `method: {config.method}`, whose loss is not over each next token; "
            "remove it, or train the layer in a stage of `method: sft`"
        )
    yield from _part_errors(config)


def _part_errors(config: TrainFields) -> Iterator[str]:
    """Yield why a recipe may not freeze these parts of its model, or let them learn at rates of their own."""
    if len({*config.freeze}) == len(get_args(ModelPart)):
        yield "`freeze` names all parts of the model, so that nothing would learn; leave one out"
    if both := [part for part in config.part_learning_rates.named if part in config.freeze]:
        yield f"`freeze` and `part_learning_rates` both name {both[0]}, which is frozen; remove it from one of them"
    for part, rate in config.part_learning_rates.named.items():
        if config.weight_decay * rate >= 1:
            yield (
                f"`weight_decay: {config.weight_decay:g}` × `part_learning_rates.{part}: {rate:g}` is the fraction by "
                "which a step shrinks each weight; expected less than 1"
            )


def media_errors(config: TrainFields, media: str = "media") -> Iterator[str]:
    """Yield a sentence for each option with which no model is trained on rows with media. media: kinds, in words."""
    features = {**config.features(), "media": f"data with {media}"}
    yield from feature_errors(config.engine, features)
    yield from _refusals(config, features)


def layout_problems(config: TrainFields) -> Iterator[str]:
    """Yield conflicts of the recipe's parallel layout with engine, other options, batch size or number of processes."""
    yield from _refusals(config, config.features())


def _refusals(config: TrainFields, features: Features) -> Iterator[str]:
    if not isinstance(config.layout, AutoLayout):
        yield from refusals(config.engine, config.layout, config.constraints, features)


def input_problems(config: TrainFields, stages: Mapping[str, StageConfig]) -> Iterator[str]:
    """Yield problems with the stages that a train stage takes as inputs, such as a quantized model."""
    for field, name in config.references().items():
        if stages[name].RELATION == "quantized":
            yield (
                f"{field}: {name} is quantized, and quantized weights cannot be trained; expected the model that "
                f"it is made from, {stages[name].references()['model']}"
            )
    yield from start_problems(config.model, config.base, config.adapter, stages)
    yield from config.data.problems_among(stages)
    for acting in config.acting.values():
        for field, problem in acting.options.environment.problems() if acting.options.environment else ():
            yield f"{config.method}.{acting.field}.{field}: {problem}"
    for place, part in config.data.parts.items():
        if stages[part.dataset_stage].brings_media:
            yield from media_problems(config, f"{place}dataset")


def media_problems(config: TrainFields, field: str) -> Iterator[str]:
    """Yield why a recipe cannot train on rows with media, of which the data's field is known to have some."""
    if problems := "; ".join(media_errors(config)):
        yield f"data.{field}: the rows have media: {problems}"


def start_problems(
    model: str, base: str | None, adapter: AdapterConfig | None, stages: Mapping[str, StageConfig]
) -> Iterator[str]:
    """Yield conflicts of a train stage's `base` and `adapter` with the model or adapter that it starts from."""
    if stages[model].product != "adapter":
        if base:
            yield f"base: is {base}, but {model} is no adapter; remove it"
        if adapter and adapter.stack:
            yield f"adapter.stack: {model} is no adapter that could be merged; remove it"
    elif base and base != base_of(model, stages):
        yield f"base: is {base}, but the base of {model} is {base_of(model, stages)}; remove it: it is derived"
    elif adapter is None:
        yield (
            f"adapter: missing, and {model} makes an adapter; add `adapter:` to continue it, or train the model that a "
            "stage of `kind: merge` makes of it"
        )
    elif adapter.stack:
        if adapter.use_dora or written_adapter(model, stages).get("use_dora"):
            yield "adapter.stack: an adapter with `use_dora` cannot be stacked; merge it by a stage of `kind: merge`"
    else:
        yield from _differences(model, adapter, stages)


def written_adapter(name: str, stages: Mapping[str, StageConfig]) -> dict[str, Any]:
    """Return the `adapter` fields that another stage needs to continue a stage's adapter; {} if its recipe has none."""
    config = stages[name]
    adapter = getattr(config, "adapter", None)
    if not isinstance(adapter, AdapterConfig):
        return {}
    written = adapter.model_dump(mode="json", include={*SAME, *SAME_LAYERS})
    rank = adapter.rank * (2 if adapter.changes_base else 1)
    if adapter.stack:
        start = written_adapter(config.references()["model"], stages)
        if not start:
            return {}
        rank += start["rank"]
    times = rank / adapter.rank
    return {**written, "rank": rank, "alpha": adapter.alpha * (math.sqrt(times) if adapter.use_rslora else times)}


def _differences(model: str, adapter: AdapterConfig, stages: Mapping[str, StageConfig]) -> Iterator[str]:
    written = written_adapter(model, stages)
    fields = adapter.model_dump(mode="json")
    for field in (*SAME, *SAME_LAYERS):
        if field in written and fields[field] != written[field]:
            yield (
                f"adapter.{field}: is {fields[field]}, but training continues the adapter of {model}, which has "
                f"{written[field]}; say the same, or `stack: merge` to put a new one on the merged model"
            )
    if adapter.init != "default":
        yield f"adapter.init: is {adapter.init}, but training continues the adapter of {model}; remove it"


def idle_fields(config: TrainFields) -> Iterator[tuple[str, str]]:
    """Yield each config field that has no effect in this training, as a dotted path, with the reason."""
    for block in ("data", "optimizer"):
        yield from ((f"{block}.{field}", why) for field, why in getattr(config, block).idle_fields())
    yield from _idle_fields_of_sampling(config)
    if config.learning.rows == "pairs":
        yield "data.turns", f"`method: {config.method}` learns from single answers"
    if config.precision != "fp8":
        yield "fp8_recipe", f"`precision: {config.precision}` has no products in 8 bits"
    if config.schedule == "constant":
        yield "min_learning_rate_fraction", "`schedule: constant` ends where it began"
    if not config.weight_decay:
        yield "decay_norms_and_biases", "`weight_decay` is 0"
    if config.adapter and config.adapter.init != "eva":
        yield "adapter.eva_rho", f"`adapter.init: {config.adapter.init}` gives all layers the same rank"
    if config.steps:
        yield "epochs", f"`steps: {config.steps}` says how long to train"
    if not config.data.holds_out:
        yield (
            "execution.evaluate_every_steps",
            "no rows are held out (`data.evaluation_split` or `data.evaluation_fraction`)",
        )


def _idle_fields_of_sampling(config: TrainFields) -> Iterator[tuple[str, str]]:
    """Yield config fields on sampling or teachers that have no effect in this training, with the reason."""
    if config.rollouts:
        yield from ((f"data.{field}", why) for field, why in IDLE_DATA.items())
    sampling, block = config.sampling, config.sampling_block
    if sampling and sampling.server:
        why = f"`{block}.server` was started by others"
        yield from ((f"{block}.serving.{field}", why) for field in OF_OWN_SERVERS)
        yield f"{block}.data_parallel_size", why
    if not sampling:
        yield "execution.ready_timeout_s", f"`method: {config.method}` samples no completions"
    if not (sampling or config.teacher_server):
        for field in ("rollout_timeout_s", "concurrent_requests"):
            yield f"execution.{field}", f"`method: {config.method}` asks no server"


def machine_problems(config: TrainFields, gpus: Sequence[str]) -> Iterator[str]:
    """Yield what this machine lacks: a torch that sees its GPUs, a compiler, what 8-bit products need.

    Machines of clusters are looked at when the stage starts.
    """
    if not config.execution.is_local:
        return
    if gpus and (problem := unusable_gpus(len(gpus), {**os.environ, **config.execution.environment})):
        yield "; ".join(problem)
    if config.layout.compile and (missing := missing_compiler(bool(gpus))):
        yield missing
    if config.precision != "fp8":
        return
    if not gpus:
        yield "`precision: fp8` is for NVIDIA GPUs, and this machine has none; set `precision: bf16`"
    for name in gpus:
        hardware = named_like(name)
        if hardware and hardware.fp8_tflops is None:
            yield f"`precision: fp8`: {name} does not multiply in 8 bits; set `precision: bf16`"
    if missing := RULES[config.engine].missing_package(config.precision):
        yield missing
