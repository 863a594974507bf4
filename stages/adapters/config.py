"""Recipe options of LoRA adapters: low-rank weights trained beside a frozen base model (Hu et al. 2021)."""

import re
from dataclasses import fields
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from stages.core.fields import AddedLater, NonNegativeFp32, PositiveFp32, StrictModel
from stages.core.patterns import LIMIT_S, is_endless_on_names
from stages.planner.adapted import PlannedAdapter

BasePrecision = Literal["bf16", "fp32", "nf4", "int8"]
Initialization = Literal["default", "pissa", "pissa_niter_4", "pissa_niter_16", "olora", "eva"]


class AdapterConfig(StrictModel):
    """Options of a LoRA adapter, named as in PEFT: W x becomes W x + (alpha / rank) B A dropout(x)."""

    type: Literal["lora"] = "lora"
    rank: PositiveInt = Field(16, description="LoRA rank: the number of rows of A and of columns of B.")
    alpha: PositiveFp32 = Field(32, description="LoRA scaling: B A x is multiplied by alpha / rank.")
    dropout: NonNegativeFp32 = Field(
        0.0,
        lt=1,
        description="Probability with which an input of LoRA's A is dropped in training; each process draws its own.",
    )
    target_modules: Literal["all-linear"] | tuple[str, ...] | str = Field(
        "all-linear",
        description="Linear layers that get an adapter. all-linear: all but the output head; in a mixture of experts, "
        "experts and routers too if PEFT knows the model. Otherwise endings of layer names, such as "
        "q_proj, or one regular expression for whole names.",
    )
    target_parameters: Annotated[tuple[str, ...], AddedLater()] = Field(
        (),
        description="Endings of names of further parameters that hold all experts of a layer "
        "(mlp.experts.gate_up_proj, mlp.experts.down_proj): each expert gets its own A and B.",
    )
    exclude_modules: tuple[str, ...] = Field((), description="Endings of names of layers that get no adapter.")
    layers_to_transform: tuple[NonNegativeInt, ...] | None = Field(
        None, min_length=1, description="Numbers, from 0, of the transformer layers that get an adapter; default: all."
    )
    use_rslora: bool = Field(
        False, description="rsLoRA: multiply B A x by alpha / √rank instead of alpha / rank (Kalajdzievski 2023)."
    )
    use_dora: Annotated[bool, AddedLater()] = Field(
        False,
        description="DoRA: learn the length of each row of W + B A separately from its direction (Liu et al. 2024).",
    )
    init: Annotated[Initialization, AddedLater()] = Field(
        "default",
        description="Initial values. default: A random, B 0. pissa: the largest singular vectors of W, subtracted "
        "from it (Meng et al. 2024); pissa_niter_4, pissa_niter_16: the same approximated in 4 or 16 "
        "iterations. olora: the QR decomposition of W, also subtracted. eva: the directions in which a "
        "layer's inputs vary most, with ranks accordingly (Paischer et al. 2024). The written adapter "
        "fits the unchanged base model.",
    )
    eva_rho: Annotated[PositiveFp32, AddedLater()] = Field(
        2.0,
        ge=1,
        description="Largest rank of a layer with `init: eva`, as a multiple of `rank`; 1: all have `rank`.",
    )
    modules_to_save: Annotated[tuple[str, ...], AddedLater()] = Field(
        (), description="Endings of names of modules that are trained as a whole and written with the adapter."
    )
    loraplus_lr_ratio: Annotated[PositiveFp32 | None, AddedLater()] = Field(
        None, description="LoRA+: learning rate of B as a multiple of that of A (Hayou et al. 2024); default: 1."
    )
    base_precision: Annotated[BasePrecision | None, AddedLater()] = Field(
        None,
        description="Precision of the frozen model in training; default: that of the computation. nf4 (QLoRA, 4.13 "
        "bits a weight) and int8 quantize its linear layers; merging, serving and evaluation use the "
        "unquantized model.",
    )
    stack: Annotated[Literal["merge"] | None, AddedLater()] = Field(
        None,
        description="Treatment of a `model` that is itself an adapter. Default: it is trained further. merge: a new "
        "one is trained on the merged model, and their sum is written as one adapter, of the sum of their "
        "ranks.",
    )

    @property
    def used_options(self) -> dict[str, object]:
        """Options that differ from their defaults, by name."""
        default = type(self)()
        return {name: value for name, value in self if value != getattr(default, name)}

    @property
    def changes_base(self) -> bool:
        """Return whether LoRA's initial B A is subtracted from the base model's weights while the adapter trains."""
        return self.init not in ("default", "eva")

    @property
    def starts_from_weights(self) -> bool:
        """Return whether the adapter needs or changes the base model's whole weights before training starts."""
        return self.init != "default" or self.use_dora or self.stack is not None

    @property
    def highest_rank(self) -> int:
        """Highest LoRA rank that a layer may get."""
        return round(self.rank * self.eva_rho) if self.init == "eva" else self.rank

    @property
    def for_planner(self) -> PlannedAdapter:
        """Options of the adapter that decide memory and time, for the planner."""
        return PlannedAdapter(**{one.name: getattr(self, one.name) for one in fields(PlannedAdapter)})

    @field_validator("target_modules")
    @classmethod
    def _names_something(cls, targets: tuple[str, ...] | str) -> tuple[str, ...] | str:
        if targets == "":
            raise ValueError("found nothing that could learn; expected all-linear, names or a pattern")
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(f"found {targets!r}, which is no regular expression: {error}") from error
            if targets != "all-linear" and is_endless_on_names(targets):
                raise ValueError(
                    f"found {targets!r}, which takes over {LIMIT_S:g} s to compare with the name of a layer; expected "
                    "a pattern without repetitions of repetitions"
                )
        return targets

    @model_validator(mode="after")
    def _something_learns(self) -> Self:
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                "target_modules and target_parameters: found nothing that could learn; expected all-linear, names or a "
                "pattern"
            )
        return self

    @model_validator(mode="after")
    def _options_go_together(self) -> Self:
        if self.use_dora and self.changes_base:
            raise ValueError(
                f"`use_dora` does not go with `init: {self.init}`: no plain adapter of the unchanged base would give "
                "the same; remove one"
            )
        if self.use_dora and self.base_precision in ("nf4", "int8"):
            raise ValueError(
                f"`use_dora` does not go with `base_precision: {self.base_precision}`: lengths of rows would be "
                "those of other weights; say bf16, or remove one"
            )
        if self.init == "eva" and self.stack:
            raise ValueError(
                "`init: eva` does not go with `stack: merge`: layers would have ranks of their own; merge by a stage "
                "of `kind: merge`, or remove one"
            )
        if self.target_parameters and self.not_on_parameters:
            raise ValueError(
                f"`target_parameters` does not go with {' and '.join(self.not_on_parameters)}: PEFT has no such "
                "adapters on parameters; remove one"
            )
        return self

    @property
    def not_on_parameters(self) -> list[str]:
        """Options set that cannot apply to stacked experts, whose adapter is added to the weight, before an input."""
        found = {
            "dropout": self.dropout > 0,
            "use_dora": self.use_dora,
            f"init: {self.init}": self.init != "default",
            f"base_precision: {self.base_precision}": self.base_precision in ("nf4", "int8"),
            "stack": self.stack is not None,
        }
        return [f"`{name}`" for name, is_said in found.items() if is_said]
