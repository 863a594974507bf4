"""What a recipe may say of a quantization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from stages.core.contract import DatasetReference, ModelReference, StageConfig, StrictModel
from stages.core.fields import AddedLater, Product
from stages.quantize.registry import METHODS
from stages.serving.quantization import Quantization

if TYPE_CHECKING:
    Method = str
else:
    Method = Literal[tuple(METHODS)]
ROUTERS = (r"re:.*\.(mlp|block_sparse_moe|feed_forward)\.(gate|router)$", r"re:.*\.shared_expert_gate$")
"""Which expert a token goes to hangs on small differences, and the matrix is tiny: never quantized."""


class CalibrationConfig(StrictModel):
    """Rows that show the quantizer what activations look like, and held-out rows that judge it."""

    dataset: DatasetReference
    split: str = Field("train", description="Files of the dataset whose name or folder begins with this.")
    evaluation_split: str | None = Field(
        None, description="Rows that the KL is measured on; default: rows after these."
    )
    num_samples: PositiveInt = Field(128, description="Rows that the quantizer sees.")
    num_evaluation_samples: PositiveInt = Field(128, description="Rows that the KL is measured on.")
    evaluate_on: Annotated[Literal["all", "assistant"], AddedLater()] = Field(
        "all",
        description="Tokens whose predictions the KL is a mean over. assistant: those that training learns from a "
        "conversation; a model that was never trained on the others predicts them at random, quantized or not.",
    )
    sequence_length: PositiveInt = Field(512, description="Tokens of a row, at most.")


class QuantizeConfig(StageConfig):
    """Quantize a model (→ `model/`)."""

    STAGE_VERSION: ClassVar[int] = 1

    kind: Literal["quantize"]
    model: ModelReference
    method: Method = Field(
        description="awq, gptq: W4A16 in groups; int8: W8A8; fp8: W8A8 with dynamic activation scales."
    )
    group_size: PositiveInt = Field(128, description="Input channels that share a scale (awq and gptq).")
    symmetric: bool = Field(False, description="Without zero points (awq and gptq).")
    ignore: tuple[str, ...] = Field(("lm_head",), description="Modules left unquantized; `re:` begins a pattern.")
    calibration: CalibrationConfig
    max_kl: PositiveFloat | None = Field(None, description="Nats per token from the unquantized model, at most.")
    tensor_parallel_size: PositiveInt = Field(1, description="That the model will be served at.")
    trust_remote_code: bool = Field(False, description="Run the Python files that come with the model.")
    seed: int = Field(0, ge=0, description="Of the quantizer's random numbers.")

    @property
    def product(self) -> Product:
        return "model"

    @property
    def quantization(self) -> Quantization:
        """What the engine that will serve the model must know."""
        return Quantization(
            method=self.method,
            weights=METHODS[self.method].weights,
            group_size=self.group_size,
            symmetric=self.symmetric,
            ignore=(*self.ignore, *ROUTERS),
            tensor_parallel_size=self.tensor_parallel_size,
        )
