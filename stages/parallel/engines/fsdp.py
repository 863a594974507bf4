"""Rules about what the FSDP2 engine supports: every recipe option and model, shared matrices and shared tokens."""

import importlib.util
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import ClassVar

from stages.core.shipped import shipped
from stages.models.linear_layers import linear_layers
from stages.models.shape import ModelShape
from stages.parallel.engines.rules import APART, UNTRIED, EngineRules, Feature
from stages.parallel.layout import Layout, RunConstraints


class FsdpRules(EngineRules):
    """Rules about the FSDP2 engine, which trains Transformers' own model code."""

    name = "fsdp"
    factors = ("dp_replicate", "dp_shard")
    own_fields = (
        *("tp", "cp", "ep", "sequence_parallel"),
        *("reshard_after_forward", "cpu_offload", "prefetch_layers", "compile", "accumulate"),
    )

    apart: ClassVar[Mapping[Feature, Mapping[Feature, str]]] = {
        **APART,
        "tp": dict.fromkeys(("fp8", "mtp_loss", "score_head", "quantized_base", "eva"), ""),
        "cp": dict.fromkeys(("fp8", "mtp_loss", "score_head", "media"), ""),
        "ep": {
            **dict.fromkeys(("fp8", "mtp_loss", "score_head", "compile"), ""),
            "adapted_experts": ", which `adapter.exclude_modules` leaves out",
        },
        "sequence_parallel": {"compile": "", "media": UNTRIED},
        "compile": {
            **APART["compile"],
            "replay_experts": ", which looks into each layer's forward pass, of which it makes one graph",
        },
    }

    def layout_errors(self, layout: Layout, constraints: RunConstraints) -> Iterator[str]:
        if layout.optimizer_shards % layout.ep:
            yield (
                f"layout: ep {layout.ep} does not divide dp_shard {layout.dp_shard} × cp {layout.cp} = "
                f"{layout.optimizer_shards} processes, over which experts are spread"
            )

        if layout.cp > constraints.sequence_length:
            yield (
                f"layout: cp {layout.cp} leaves processes without any of the {constraints.sequence_length} tokens of a "
                "row (`data.sequence_length`)"
            )

    def model_errors(self, layout: Layout, shape: ModelShape) -> Iterator[str]:
        yield from _split_errors(layout, shape) if layout.tp > 1 else ()
        yield from _token_errors(shape) if layout.tp > 1 and layout.sequence_parallel else ()
        yield from _slice_errors(layout, shape) if layout.cp > 1 else ()
        yield from _expert_errors(layout, shape) if layout.ep > 1 else ()

    def layout_warnings(self, layout: Layout, constraints: RunConstraints, shape: ModelShape) -> Iterator[str]:
        yield from super().layout_warnings(layout, constraints, shape)
        # Heads that `tp` leaves to one process.
        heads = {number // layout.tp for number in _heads(shape)}
        if left := [str(number) for number in sorted(heads) if number % layout.cp]:
            divides = math.gcd(layout.cp, *heads)
            yield (
                f"layout: cp {layout.cp} does not divide the {' and '.join(left)} attention heads of a process, so "
                f"that each gathers keys and values of all tokens; one that divides them: cp {divides}"
            )

    def missing_package(self, precision: str) -> str | None:
        if precision != "fp8" or importlib.util.find_spec("torchao"):
            return None
        return (
            "`precision: fp8` with `engine: fsdp` multiplies by torchao, which is not installed here; install it "
            f"(`pip install --no-deps -r {shipped('deploy/requirements/fp8.in')}`), or say `precision: bf16`"
        )


def _heads(shape: ModelShape) -> set[int]:
    """Return the numbers of attention heads that layers have."""
    return {one.num_heads for kind in shape.kinds for one in kind.attention} or {shape.num_heads}


def _split_errors(layout: Layout, shape: ModelShape) -> Iterator[str]:
    """Yield why the model's matrices cannot be split over `tp` processes."""
    plan = f"plan of tensor parallelism for {shape.family}"
    if not shape.has_split_plan:
        yield f"layout: tp {layout.tp}, but Transformers has no {plan}"
        return
    kv_heads = {one.num_kv_heads for kind in shape.kinds for one in kind.attention} or {shape.num_kv_heads}
    sizes = [
        *((number, "attention heads") for number in sorted(_heads(shape))),
        *((number, "key/value heads") for number in sorted(kv_heads)),
        (shape.vocab_size, "entries of the vocabulary"),
    ]
    if left := [f"{number} {what}" for number, what in sizes if number % layout.tp]:
        yield f"layout: tp {layout.tp} does not divide the model's {' and '.join(left)}"
    elif shape.split_flaw:
        yield (
            f"layout: tp {layout.tp}, but Transformers' {plan} does not compute what the whole model does: "
            f"{shape.split_flaw}"
        )


@lru_cache(maxsize=256)
def can_split_tokens(shape: ModelShape) -> bool:
    """Return whether blocks of layers are matrices that a plan splits by results, then by inputs, and nothing else."""
    layers = range(shape.num_layers) if shape.has_split_plan and not shape.num_experts else ()
    splits = {one.split for layer in layers for one in linear_layers(shape, layer)}
    return splits == {"columns", "rows"}


def _token_errors(shape: ModelShape) -> Iterator[str]:
    if shape.has_split_plan and not can_split_tokens(shape):
        yield (
            "layout: sequence_parallel splits tokens around blocks of columns, then rows, of Transformers' plan, and "
            f"{shape.family} has others in its layers"
        )


def _slice_errors(layout: Layout, shape: ModelShape) -> Iterator[str]:
    """Yield why `cp` processes cannot share the model's tokens: something but attention runs along them."""
    shares = f"layout: cp {layout.cp} shares the tokens of a document, but"
    if not shape.packs:
        yield f"{shares} documents of {shape.family} train as rows of their own"
    elif stateful := [kind for kind in shape.kinds if kind.carries_state]:
        layers = ", ".join(str(layer) for layer in sorted(layer for kind in stateful for layer in kind.layers)[:5])
        yield f"{shares} layers of {shape.family} ({layers}) carry a state along them"


def _expert_errors(layout: Layout, shape: ModelShape) -> Iterator[str]:
    """Yield why the model's experts cannot be spread over `ep` processes."""
    if not shape.num_experts:
        yield f"layout: ep {layout.ep} spreads experts, but {shape.family} has none"
    elif any(kind.experts_computed > kind.experts_per_token for kind in shape.kinds):
        yield (
            f"layout: ep {layout.ep} sends tokens to the experts that they chose, but {shape.family} computes all "
            "experts for each token"
        )
    elif shape.num_experts % layout.ep:
        yield f"layout: ep {layout.ep} does not divide the model's {shape.num_experts} experts"
