"""Config of a quantize stage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, JsonValue, PositiveInt, field_validator, model_validator

from stages.core.contract import DatasetReference, ModelReference, StageConfig, StrictModel
from stages.core.errors import RecipeError
from stages.core.fields import AddedLater, NatsPerToken, SplitName
from stages.core.patterns import LIMIT_S, is_endless_on_names
from stages.kinds.quantize.registry import METHODS
from stages.models.facts import ModelFacts
from stages.models.linear_layers import projections_of
from stages.serving.engine import Engine, GgufType, Quantization, WeightFiles, WeightFormat, is_k_quant
from stages.serving.registry import engine_of, installed_version

if TYPE_CHECKING:
    Method = str
else:
    Method = Literal[tuple(METHODS)]
ROUTERS = (r"re:.*\.(mlp|block_sparse_moe|feed_forward)\.(gate|router)$", r"re:.*\.shared_expert_gate$")
"""Layers that are never quantized: routers of mixtures.

The choice of an expert hangs on small differences, and the matrix is tiny.
"""


class CalibrationConfig(StrictModel):
    """Rows that show the quantizer what activations look like, and held-out rows that judge it."""

    dataset: DatasetReference
    split: SplitName = Field("train", description="Files of the dataset whose name or folder begins with this.")
    evaluation_split: SplitName | None = Field(
        None, description="Split of the rows that the KL is measured on; default: `split`, after the calibration rows."
    )
    num_samples: PositiveInt = Field(128, description="Number of rows that the quantizer sees.")
    num_evaluation_samples: PositiveInt = Field(128, description="Number of rows that the KL is measured on.")
    evaluate_on: Annotated[Literal["all", "assistant"], AddedLater()] = Field(
        "all",
        description="Tokens over whose predictions the KL is averaged. assistant: only tokens that training learns "
        "from; a model that was never trained on the others predicts them at random, quantized or not.",
    )
    sequence_length: int = Field(512, ge=2, description="Largest number of tokens of a row.")

    @model_validator(mode="after")
    def _judged_by_other_rows(self) -> Self:
        if self.evaluation_split == self.split:
            raise ValueError(
                f"`evaluation_split` is `split`, {self.split}: the KL would be measured on calibrated rows; "
                "remove it, and rows after those are taken, or name another split"
            )
        return self


class QuantizeConfig(StageConfig):
    """Quantize a model (→ `model/`)."""

    STAGE_VERSION: ClassVar[int] = 2
    PRODUCTS = ("model",)
    RELATION = "quantized"
    HAS_CHECK: ClassVar[bool] = True

    kind: Literal["quantize"]
    model: ModelReference
    method: Method = Field(
        description="Method of quantization. awq, gptq: W4A16 in groups; int8: W8A8; fp8: W8A8 with dynamic activation "
        "scales; gguf: one file for llama.cpp."
    )
    gguf_type: Annotated[GgufType | None, AddedLater()] = Field(
        None,
        description="With `method: gguf`, the type that matrices are stored in, embeddings included. Types with `_k` "
        "are K-quants, which llama.cpp's own library makes.",
    )
    group_size: PositiveInt = Field(128, description="Number of input channels that share a scale (awq and gptq).")
    symmetric: bool = Field(False, description="Quantize without zero points (awq and gptq).")
    ignore: tuple[str, ...] = Field(("lm_head",), description="Modules that stay unquantized; `re:` begins a pattern.")
    calibration: CalibrationConfig
    max_kl: NatsPerToken | None = Field(
        None, description="Largest allowed KL from the unquantized model, in nats per token."
    )
    tensor_parallel_size: PositiveInt = Field(1, description="Tensor parallelism with which the model will be served.")
    trust_remote_code: bool = Field(False, description="Run Python files that come with the model.")
    seed: int = Field(0, ge=0, description="Seed of the quantizer's random numbers.")

    @field_validator("ignore")
    @classmethod
    def _patterns_are_regular_expressions(cls, ignore: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in ignore:
            if not pattern.removeprefix("re:"):
                raise ValueError("an empty name or pattern; name a module, such as lm_head")
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise ValueError(f"{pattern} is no regular expression: {error}") from error
            if pattern.startswith("re:") and is_endless_on_names(pattern.removeprefix("re:")):
                raise ValueError(
                    f"{pattern} takes over {LIMIT_S:g} s to compare with the name of a layer; expected a pattern "
                    "without repetitions of repetitions"
                )
        return ignore

    @field_validator("gguf_type", mode="before")
    @classmethod
    def _some_need_an_importance_matrix(cls, gguf_type: object) -> object:
        if re.fullmatch(r"q[23]_k.*|iq.*", str(gguf_type).lower()):
            raise ValueError(
                f"{gguf_type}: so few bits need an importance matrix, which nothing here makes; choose "
                f"{', '.join(get_args(GgufType))}"
            )
        return gguf_type

    @field_validator("group_size")
    @classmethod
    def _groups_are_even(cls, group_size: int) -> int:
        if group_size % 2:
            raise ValueError(
                f"{group_size} is odd, and no kernel serves odd groups; GPUs serve 32, 64 and 128, CPUs any even size"
            )
        return group_size

    @model_validator(mode="after")
    def _options_of_the_method_only(self) -> Self:
        """Refuse options of other methods.

        In `config.json` of a stage every field is set, so a field with its default counts as unset.
        """
        if (self.method == "gguf") != bool(self.gguf_type):
            types = ", ".join(get_args(GgufType))
            wrong = f"needs `gguf_type`, one of {types}" if self.method == "gguf" else "has no use for `gguf_type`"
            raise ValueError(f"`method: {self.method}` {wrong}")
        if METHODS[self.method].weights == "int4":
            return self
        methods = " and ".join(name for name, entry in METHODS.items() if entry.weights == "int4")
        for name in ("group_size", "symmetric"):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"`{name}: {json.dumps(value)}` is an option of {methods}, and `method: {self.method}` has no use "
                    "for it; remove it"
                )
        return self

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        if stages[self.model].RELATION == "quantized":
            yield (
                f"model: {self.model} is quantized already; expected the model that it is made from, "
                f"{stages[self.model].references()['model']}"
            )

    def model_problems(self, read_config: Callable[[], Mapping[str, Any]]) -> Iterator[str]:
        """Yield why the serving engine could not load the quantized model, as far as the model's config shows it.

        What only the headers of its files show is found after its download. The devices of a cluster may accept what
        those of this machine do not.
        """
        if not self.execution.is_local:
            return
        facts = ModelFacts(read_config())
        layers = projections_of(facts.shape)
        try:
            self.serving_engine.check_loadable(facts, layers, self.quantization)
        except RecipeError as error:
            yield f"model: {error}"

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        yield from super().idle_fields()
        if self.method == "gguf":
            yield "tensor_parallel_size", "llama.cpp divides no layers"
            yield "seed", "`method: gguf` draws no random numbers"

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        """Return the inputs from outside the store, with llama.cpp's version if its library makes the K-quant
        blocks.
        """
        made_by = installed_version(self.serving_engine) if is_k_quant(self._weights) else {}
        return {**super().resolve_outside(limit_s), **made_by}

    @property
    def weight_files(self) -> WeightFiles:
        """Kind of weight files that the stage writes."""
        return self.serving_engine.capabilities.weights

    @property
    def serving_engine(self) -> Engine:
        """Engine that will serve the quantized model."""
        return engine_of(METHODS[self.method].engine)

    @property
    def _weights(self) -> WeightFormat:
        weights = METHODS[self.method].weights or self.gguf_type
        assert weights, "a validator asks for it"
        return weights

    @property
    def quantization(self) -> Quantization:
        """Facts of the quantization that the serving engine must know."""
        return Quantization(
            method=self.method,
            weights=self._weights,
            group_size=self.group_size,
            symmetric=self.symmetric,
            ignore=(*self.ignore, *ROUTERS),
            tensor_parallel_size=self.tensor_parallel_size,
        )
