"""Rules about what the Megatron-core engine supports: its kinds of parallelism and its model families.

Errors are layouts that it cannot run, warnings those that are rarely wise.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from stages.core.errors import ModelError
from stages.core.shipped import shipped
from stages.models.facts import ModelFacts, rotates_by_length
from stages.models.shape import ModelShape
from stages.parallel.engines.rules import APART, EngineRules, Feature, Features
from stages.parallel.layout import Layout, RunConstraints

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Model families, by `model_type`, whose weights can be mapped to Megatron's parameters."""
INSTALLATION = f"pip install --no-build-isolation -r {shipped('deploy/requirements/transformer-engine.in')}"
SAME_TOKENS = ", which needs the same tokens on a process in each pass; they would depend on the longest micro-batch"
USUAL_LIMITS: dict[str, tuple[int, str]] = {
    "tp": (8, "every layer waits for collectives over tp, which only the links within one node are fast enough for"),
    "pp": (16, "the bubble grows with the stages, and needs ever more micro-batches to hide in"),
    "cp": (4, "keys and values travel around all cp processes in every layer"),
}
"""Value of each parallel degree above which a layout is likely to be slow, with the reason, by degree."""


class MegatronRules(EngineRules):
    """Rules about the Megatron-core engine, which builds the model itself instead of running Transformers' code."""

    name = "megatron"
    factors = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    own_fields = ("tp", "pp", "vpp", "cp", "ep", "etp", "sequence_parallel")
    lacks: ClassVar[Features] = {
        "muon": "",
        "fewer_bits_adamw": ", which has it with Transformer Engine's optimizer only",
        "rowwise_fp8": ", which has one scale a tensor",
        "score_head": ", which has no score head here",
        "second_model": "",
        "activation_offload": "",
        "mtp_loss": "",
        "media": ", which builds the text part of a model alone",
    }
    apart: ClassVar[Mapping[Feature, Mapping[Feature, str]]] = {
        **APART,
        "cp": {"replay_experts": SAME_TOKENS},
        "sequence_parallel": {"replay_experts": SAME_TOKENS},
        "recomputed_stages": {
            "replay_experts": ", for which layers must be computed again before the next micro-batch comes"
        },
    }
    adapter_options = frozenset(
        {
            "type",
            "rank",
            "alpha",
            "dropout",
            "target_modules",
            "target_parameters",
            "exclude_modules",
            "layers_to_transform",
            "use_rslora",
            "loraplus_lr_ratio",
        }
    )
    builds_from_shape = True

    def refuses_device(self, torch_type: str) -> str | None:
        known = torch_type in ("cuda", "cpu")  # on CPUs it is slow, and right: tests of its layouts run there
        return None if known else "Megatron-core knows CUDA's devices only; use `engine: fsdp`"

    def environment(self, torch_type: str, layout: Layout) -> Mapping[str, str]:
        # With one queue, kernels run in the order of their launch, so that collectives over tp overlap with products.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if torch_type == "cuda" and layout.tp > 1 else {}

    def layout_errors(self, layout: Layout, constraints: RunConstraints) -> Iterator[str]:
        yield from _pipeline(layout, constraints)
        yield from _sequence(layout, constraints)
        yield from _expert_processes(layout)

    def model_errors(self, layout: Layout, shape: ModelShape) -> Iterator[str]:
        if shape.kinds:  # only families that the engine does not build are walked
            yield f"engine megatron has no mapping for model_type {shape.family!r}"
            return
        yield from _heads(layout, shape)
        yield from _layers(layout, shape)
        yield from _experts(layout, shape)

    def device_errors(self, torch_type: str, layout: Layout, precision: str, shape: ModelShape) -> Iterator[str]:
        if torch_type == "cpu" or (has_transformer_engine() and precision != "fp32"):
            return
        lack = "is not installed here" if not has_transformer_engine() else "does not compute in fp32"
        remedy = f"install it ({INSTALLATION}) and train in bf16 or fp8, or use engine: fsdp"
        if layout.cp > 1:
            yield (
                f"layout: cp {layout.cp} on GPUs needs Transformer Engine, which {lack}: without it attention holds a "
                f"mask of all pairs of positions, and no context parallelism saves that memory; {remedy}, or set cp 1"
            )
        if shape.num_experts:
            yield (
                f"layout: {shape.family} on GPUs needs Transformer Engine, which {lack}: without it the model's "
                f"{shape.num_experts} experts are computed one by one; {remedy}"
            )

    def layout_warnings(self, layout: Layout, constraints: RunConstraints, shape: ModelShape) -> Iterator[str]:
        for name, (limit, reason) in USUAL_LIMITS.items():
            if (degree := getattr(layout, name)) > limit:
                yield f"layout: {name} {degree} is more than the usual limit of {limit}: {reason}"
        if constraints.processes_per_node % layout.tp and constraints.nodes > 1:
            yield (
                f"layout: tp {layout.tp} does not divide the {constraints.processes_per_node} processes of a node, so "
                f"tensor parallelism crosses nodes, where its collectives are slow; choose a tp that does"
            )
        yield from _bubble(layout, constraints)
        yield from super().layout_warnings(layout, constraints, shape)
        yield from _uneven_or_copied(layout, shape)

    def shape_of(self, facts: ModelFacts) -> ModelShape:
        family = str(facts.config.get("model_type"))
        check_family(family)
        if problems := list(_peculiarities(facts.config, facts.shape)):
            raise ModelError(
                f"engine megatron trains {family} models, but not one with {', '.join(problems)}; say `engine: fsdp`, "
                "which takes any causal language model of Transformers"
            )
        return facts.shape


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed, whose kernels Megatron-core uses on GPUs."""
    return importlib.util.find_spec("transformer_engine") is not None


def check_family(family: str) -> None:
    """Raise ModelError for a model family (`model_type`) whose weights cannot be mapped to Megatron's parameters."""
    if family not in FAMILIES:
        raise ModelError(
            f"engine megatron has no mapping for model_type {family!r}; it has one for {', '.join(FAMILIES)}. Say "
            "`engine: fsdp`, which takes any causal language model of Transformers"
        )


def bubble_fraction(pp: int, vpp: int, num_micro_batches: int) -> float:
    """Return the share of a step in which a pipeline stage waits, all equally fast: (p - 1) / (v m + p - 1).

    Narayanan et al. 2021, section 2.2, give (p - 1) / (v m) of the rest.
    """
    return (pp - 1) / (vpp * num_micro_batches + pp - 1)


def _pipeline(layout: Layout, constraints: RunConstraints) -> Iterator[str]:
    if layout.vpp == 1:
        return
    if layout.pp == 1:
        yield f"layout: vpp {layout.vpp} interleaves the chunks of pipeline stages, but pp is 1; raise pp or remove vpp"
    elif _num_micro_batches(layout, constraints) % layout.pp:
        yield (
            f"layout: vpp {layout.vpp} needs micro-batches in multiples of pp {layout.pp}, but global_batch_size "
            f"{constraints.global_batch_size} / (micro_batch_size {layout.micro_batch_size} × dp_replicate "
            f"{layout.dp_replicate} × dp_shard {layout.dp_shard}) = {_num_micro_batches(layout, constraints)}; "
            "change one"
        )


def _sequence(layout: Layout, constraints: RunConstraints) -> Iterator[str]:
    """Yield an error if context and sequence parallelism cannot divide a packed row into equal parts.

    Each context-parallel process has two chunks (zigzag), which sequence parallelism cuts once more.
    """
    tp = layout.tp if layout.sequence_parallel else 1
    chunks = (2 * layout.cp if layout.cp > 1 else 1) * tp
    if constraints.sequence_length % chunks:
        factors = [f"2 × cp {layout.cp}"] if layout.cp > 1 else []
        factors += [f"tp {tp} (sequence_parallel)"] if tp > 1 else []
        yield (
            f"layout: data.sequence_length {constraints.sequence_length} is not divisible by {' × '.join(factors)} = "
            f"{chunks}; the next length that is: {-(-constraints.sequence_length // chunks) * chunks}"
        )


def _expert_processes(layout: Layout) -> Iterator[str]:
    processes = layout.data_parallel_size * layout.tp * layout.cp
    if processes % (layout.ep * layout.etp):
        yield (
            f"layout: ep {layout.ep} × etp {layout.etp} = {layout.ep * layout.etp} does not divide the {processes} "
            f"processes of a pipeline stage (dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard} × tp "
            f"{layout.tp} × cp {layout.cp}), over which experts are spread"
        )
    elif layout.optimizer_shards > 1 and processes // (layout.ep * layout.etp) % layout.dp_replicate:
        yield (
            f"layout: each expert is on {processes // (layout.ep * layout.etp)} processes (dp_replicate "
            f"{layout.dp_replicate} × dp_shard {layout.dp_shard} × tp {layout.tp} × cp {layout.cp} / (ep {layout.ep} × "
            f"etp {layout.etp})), which dp_replicate {layout.dp_replicate} does not divide; dp_replicate 1 with a "
            "larger dp_shard does"
        )


def _heads(layout: Layout, shape: ModelShape) -> Iterator[str]:
    tp, kv_heads = layout.tp, shape.num_kv_heads
    if shape.num_heads % tp:
        yield f"layout: tp {tp} does not divide the model's {shape.num_heads} attention heads"
    elif kv_heads % tp and tp % kv_heads:
        yield (
            f"layout: tp {tp} neither divides the model's {kv_heads} key/value heads nor is a multiple of them, so "
            "they can be neither spread nor copied evenly"
        )
    # A model of mixture layers alone has no dense feed-forward width to divide.
    dense = shape.num_layers > shape.num_mixture_layers
    if dense and shape.ffn_size % tp:
        yield f"layout: tp {tp} does not divide the model's feed-forward width {shape.ffn_size}"


def _layers(layout: Layout, shape: ModelShape) -> Iterator[str]:
    if layout.pp * layout.vpp > shape.num_layers:
        yield (
            f"layout: pp {layout.pp} × vpp {layout.vpp} = {layout.pp * layout.vpp} chunks of layers, but the model has "
            f"only {shape.num_layers} layers"
        )


def _experts(layout: Layout, shape: ModelShape) -> Iterator[str]:
    if not shape.num_experts:
        if layout.ep > 1 or layout.etp > 1:
            yield (
                f"layout: ep {layout.ep} and etp {layout.etp} spread experts, but {shape.family} has none; set both to "
                "1"
            )
        return
    if shape.experts_per_token == 1 and shape.router_normalizes:
        yield "layout: the router weighs its one expert by 1, which Megatron-core cannot train; use engine: fsdp"
    if shape.num_experts % layout.ep:
        yield f"layout: ep {layout.ep} does not divide the model's {shape.num_experts} experts"
    if shape.expert_ffn_size % layout.etp:
        yield f"layout: etp {layout.etp} does not divide the width {shape.expert_ffn_size} of the model's experts"
    if layout.tp > 1 and not layout.sequence_parallel:
        yield f"layout: with experts, tp {layout.tp} needs sequence_parallel: true (Megatron-core trains no other way)"


def _bubble(layout: Layout, constraints: RunConstraints) -> Iterator[str]:
    num_micro_batches = _num_micro_batches(layout, constraints)
    if num_micro_batches < layout.pp:
        share = bubble_fraction(layout.pp, layout.vpp, max(1, num_micro_batches))
        yield (
            f"layout: {num_micro_batches} micro-batches for pp {layout.pp} stages leave each stage idle for "
            f"{share:.0%} of a step; raise global_batch_size, or lower pp, micro_batch_size or data parallelism"
        )


def _uneven_or_copied(layout: Layout, shape: ModelShape) -> Iterator[str]:
    num_chunks = layout.pp * layout.vpp
    if shape.num_layers % num_chunks:
        least = shape.num_layers // num_chunks
        yield (
            f"layout: the model's {shape.num_layers} layers do not divide by pp {layout.pp} × vpp {layout.vpp} = "
            f"{num_chunks}: some stages get {least}, others {least + 1}, and all wait for those"
        )
    if layout.tp > shape.num_kv_heads:
        yield (
            f"layout: tp {layout.tp} is more than the model's {shape.num_kv_heads} key/value heads, so each is "
            f"computed by {layout.tp // shape.num_kv_heads} processes"
        )


def _num_micro_batches(layout: Layout, constraints: RunConstraints) -> int:
    return constraints.global_batch_size // (layout.micro_batch_size * layout.data_parallel_size)


def _peculiarities(config: Mapping[str, Any], shape: ModelShape) -> Iterator[str]:
    """Yield options in the model's config that the Megatron engine would silently ignore."""
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {config['hidden_act']}"
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}  # Transformers 5, else 4
    rope_type = str(parameters.get("rope_type") or parameters.get("type"))  # `type` is the name in older configs
    if rotates_by_length(rope_type):
        yield f"rope_type {rope_type}, whose angles depend on the length of a document"
    if shape.output_bias:
        yield "attention_bias (on the output projection too)"
    if shape.ffn_bias:
        yield "mlp_bias"
    for noise in ("attention_dropout", "router_jitter_noise"):
        if config.get(noise):
            yield f"{noise} {config[noise]}"
