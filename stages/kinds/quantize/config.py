"""Config of the quantize stage, which makes a model smaller for serving."""

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
"""Routers of experts, never quantized: their choice hangs on small differences, and the matrix is tiny."""


class CalibrationConfig(StrictModel):
    """Dataset rows for a quantization: some calibrate the quantizer, others measure the loss of quality."""

    dataset: DatasetReference
    split: SplitName = Field(
        "train", description="Split of the calibration rows: files whose name or folder begins with this text."
    )
    evaluation_split: SplitName | None = Field(
        None,
        description="Split of the rows on which the KL divergence is measured; default: the rows of `split` after the "
        "calibration rows.",
    )
    num_samples: PositiveInt = Field(128, description="Number of calibration rows.")
    num_evaluation_samples: PositiveInt = Field(
        128, description="Number of rows on which the KL divergence from the unquantized model is measured."
    )
    evaluate_on: Annotated[Literal["all", "assistant"], AddedLater()] = Field(
        "all",
        description="Tokens over which the KL divergence is averaged: all, or (assistant) those that training learns "
        "from, since predictions of others are random.",
    )
    sequence_length: int = Field(512, ge=2, description="Largest number of tokens of a row; longer rows are cut off.")

    @model_validator(mode="after")
    def _judged_by_other_rows(self) -> Self:
        if self.evaluation_split == self.split:
            raise ValueError(
                f"`evaluation_split` is `split`, {self.split}: the KL would be measured on calibrated rows; "
                "remove it, and rows after those are taken, or name another split"
            )
        return self


class QuantizeConfig(StageConfig):
    """Config of the quantize stage: stores a model's weights in fewer bits, and measures how its predictions change."""

    STAGE_VERSION: ClassVar[int] = 2
    PRODUCTS = ("model",)
    RELATION = "quantized"
    HAS_CHECK: ClassVar[bool] = True

    kind: Literal["quantize"]
    model: ModelReference
    method: Method = Field(
        description="Quantization method. awq, gptq: 4-bit weights in groups (W4A16); int8: 8-bit weights and "
        "activations (W8A8); fp8: the same in FP8, with dynamic activation scales; gguf: one file for "
        "llama.cpp, in `gguf_type`."
    )
    gguf_type: Annotated[GgufType | None, AddedLater()] = Field(
        None,
        description="Only with `method: gguf`: format of matrices, embeddings included. `_k`: K-quants, written by "
        "llama.cpp's library.",
    )
    group_size: PositiveInt = Field(
        128, description="Number of input channels that share a scale; only for awq and gptq."
    )
    symmetric: bool = Field(False, description="Quantize without zero points; only for awq and gptq.")
    ignore: tuple[str, ...] = Field(
        ("lm_head",), description="Names of modules to leave unquantized, or patterns of names that begin with `re:`."
    )
    calibration: CalibrationConfig
    max_kl: NatsPerToken | None = Field(
        None,
        description="Largest KL divergence from the unquantized model, in nats per token, above which the stage "
        "fails; default: none.",
    )
    tensor_parallel_size: PositiveInt = Field(
        1,
        description="GPUs that will share each layer when served; layers that cannot be split so are refused.",
    )
    trust_remote_code: bool = Field(False, description="Allow the Python code that comes with the model to run.")
    seed: int = Field(0, ge=0, description="Random seed of the quantizer.")

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
        """Refuse options of other quantization methods; defaults count as unset, as a stage's `config.json` has all."""
        names_no_type = METHODS[self.method].weights is None
        if names_no_type != bool(self.gguf_type):
            types = ", ".join(get_args(GgufType))
            wrong = f"needs `gguf_type`, one of {types}" if names_no_type else "has no use for `gguf_type`"
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
        """Yield the reasons why the serving engine could not load the quantized model, as far as its config shows them.

        What only its files' headers show is found after its download. A cluster's devices may accept more.
        """
        facts = ModelFacts(read_config())
        if problem := self.problem_of_tower(facts):
            yield f"model: {problem}"
            return
        if not self.execution.is_local:
            return
        layers = projections_of(facts.shape)
        try:
            self.serving_engine.check_loadable(facts, layers, self.quantization)
        except RecipeError as error:
            yield f"model: {error}"

    def problem_of_tower(self, facts: ModelFacts) -> str | None:
        """Return why the method cannot take a model that sees, if it is one; None for a method that can."""
        problem = METHODS[self.method].loses_towers
        if not problem or not facts.config.get("vision_config"):
            return None
        others = ", ".join(name for name, entry in METHODS.items() if not entry.loses_towers)
        return f"{problem}; choose one of {others}, which leave the tower as it is"

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        yield from super().idle_fields()
        yield from METHODS[self.method].idle

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        """Return llama.cpp's version for the cache key, only for K-quants, which its library writes."""
        made_by = installed_version(self.serving_engine) if is_k_quant(self._weights) else {}
        return {**super().resolve_outside(limit_s), **made_by}

    @property
    def weight_files(self) -> WeightFiles:
        return self.serving_engine.capabilities.weights

    @property
    def serving_engine(self) -> Engine:
        return engine_of(METHODS[self.method].engine)

    @property
    def _weights(self) -> WeightFormat:
        weights = METHODS[self.method].weights or self.gguf_type
        assert weights, "a validator asks for it"
        return weights

    @property
    def quantization(self) -> Quantization:
        return Quantization(
            method=self.method,
            weights=self._weights,
            group_size=self.group_size,
            symmetric=self.symmetric,
            ignore=(*self.ignore, *ROUTERS),
            tensor_parallel_size=self.tensor_parallel_size,
        )
