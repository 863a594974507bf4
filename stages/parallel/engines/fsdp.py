"""Rules about what the FSDP2 engine supports: every recipe option and model, tensor parallelism of whole models."""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import ClassVar

from stages.models.shape import ModelShape
from stages.parallel.engines.rules import EngineRules, Feature
from stages.parallel.layout import Layout

INSTALLATION = "pip install --no-deps -r deploy/requirements/fp8.in"


class FsdpRules(EngineRules):
    """Rules about the FSDP2 engine, which trains Transformers' own model code."""

    name = "fsdp"
    factors = ("dp_replicate", "dp_shard")
    own_fields = ("tp", "reshard_after_forward", "cpu_offload", "prefetch_layers", "compile", "accumulate")

    lacks: ClassVar[Mapping[Feature, str]] = {"splits_all": ""}

    def model_errors(self, layout: Layout, shape: ModelShape) -> Iterator[str]:
        if layout.tp == 1:
            return
        attention = [one for kind in shape.kinds for one in kind.attention]
        heads = {one.num_heads for one in attention} or {shape.num_heads}
        kv_heads = {one.num_kv_heads for one in attention} or {shape.num_kv_heads}
        sizes = [
            *((number, "attention heads") for number in sorted(heads)),
            *((number, "key/value heads") for number in sorted(kv_heads)),
            (shape.vocab_size, "entries of the vocabulary"),
        ]
        if left := [f"{number} {what}" for number, what in sizes if number % layout.tp]:
            divides = next(tp for tp in range(layout.tp, 0, -1) if not any(number % tp for number, _ in sizes))
            yield (
                f"layout: tp {layout.tp} does not divide the model's {' and '.join(left)}; the nearest that does: "
                f"tp {divides}"
            )

    def missing_package(self, precision: str) -> str | None:
        if precision != "fp8" or importlib.util.find_spec("torchao"):
            return None
        return (
            "`precision: fp8` with `engine: fsdp` multiplies by torchao, which is not installed here; install it "
            f"(`{INSTALLATION}`), or say `precision: bf16`"
        )
