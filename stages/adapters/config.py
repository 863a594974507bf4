"""Recipe options of adapters: low-rank weights that learn beside a frozen base (LoRA, Hu et al. 2021)."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from stages.core.fields import AddedLater, NonNegativeFp32, PositiveFp32, StrictModel
from stages.core.patterns import LIMIT_S, is_endless_on_names
from stages.planner.adapted import LowRank

BasePrecision = Literal["bf16", "fp32", "nf4", "int8"]
Initialization = Literal["default", "pissa", "pissa_niter_4", "pissa_niter_16", "olora", "eva"]


class AdapterConfig(StrictModel):
    """Adapter options, named as in PEFT: a layer W x becomes W x + (alpha / rank) B A dropout(x)."""

    type: Literal["lora"] = "lora"
    rank: PositiveInt = Field(16, description="Rank of the adapter: rows of A and columns of B.")
    alpha: PositiveFp32 = Field(32, description="LoRA scaling: B A x is multiplied by alpha / rank.")
    dropout: NonNegativeFp32 = Field(
        0.0, lt=1, description="Dropout of the input of LoRA's A; each process draws its own."
    )
    target_modules: Literal["all-linear"] | tuple[str, ...] | str = Field(
        "all-linear",
        description="Layers that the adapter is put on. all-linear: all but the head, as PEFT has it (where it "
        "knows the mixture of experts: attention, experts and router; else no experts); else ends "
        "of names (q_proj), or one regular expression over whole names.",
    )
    target_parameters: Annotated[tuple[str, ...], AddedLater()] = Field(
        (),
        description="Ends of names of parameters that are adapted, too, where all experts of a layer are one "
        "(mlp.experts.gate_up_proj, mlp.experts.down_proj): each expert has its own A and B.",
    )
    exclude_modules: tuple[str, ...] = Field((), description="Ends of names of layers that get no adapter.")
    layers_to_transform: tuple[NonNegativeInt, ...] | None = Field(
        None, min_length=1, description="Numbers of the transformer layers that get an adapter; default: all."
    )
    use_rslora: bool = Field(False, description="rsLoRA: B A x is scaled by alpha / √rank (Kalajdzievski 2023).")
    use_dora: Annotated[bool, AddedLater()] = Field(
        False, description="DoRA: the length of each row of W + B A learns apart from its direction (Liu et al. 2024)."
    )
    init: Annotated[Initialization, AddedLater()] = Field(
        "default",
        description="Initial A and B. default: A random, B 0. pissa: the largest singular vectors of W, which "
        "are taken out of it (Meng et al. 2024); pissa_niter_16: found in 16 quick rounds. olora: its QR "
        "decomposition. eva: A the directions in which the inputs of training rows vary most, in which layers share "
        "their ranks (Paischer et al. 2024). A plain LoRA of the unchanged base is written.",
    )
    eva_rho: Annotated[PositiveFp32, AddedLater()] = Field(
        2.0, ge=1, description="With `init: eva`, a layer's rank is at most so many times `rank`; 1: all have `rank`."
    )
    modules_to_save: Annotated[tuple[str, ...], AddedLater()] = Field(
        (), description="Ends of names of modules that are trained as a whole and written with the adapter."
    )
    loraplus_lr_ratio: Annotated[PositiveFp32 | None, AddedLater()] = Field(
        None, description="LoRA+: B learns at so many times the learning rate (Hayou et al. 2024)."
    )
    base_precision: Annotated[BasePrecision | None, AddedLater()] = Field(
        None,
        description="Precision of the frozen model in training; default: as it is computed. nf4 (QLoRA, 4.13 bits a "
        "weight) and int8 apply to its linear layers; the unquantized model is merged, served and evaluated.",
    )
    stack: Annotated[Literal["merge"] | None, AddedLater()] = Field(
        None,
        description="Treatment of an adapter as the start. merge, where `model` is an adapter: train a new one "
        "on the merged model, and write the sum as one adapter of the base, whose rank is the sum; "
        "default: train the adapter further.",
    )

    @property
    def changes_base(self) -> bool:
        """Return whether the adapter's initial A and B are taken out of the base while it trains."""
        return self.init not in ("default", "eva")

    @property
    def starts_from_weights(self) -> bool:
        """Return whether the adapter needs the base's whole weights, or changes them, before training starts."""
        return self.init != "default" or self.use_dora or self.stack is not None

    @property
    def highest_rank(self) -> int:
        """Highest rank that a LoRA layer may get."""
        return round(self.rank * self.eva_rho) if self.init == "eva" else self.rank

    @property
    def for_planner(self) -> LowRank:
        """Adapter fields that decide memory and time, for the planner."""
        return LowRank(**{one.name: getattr(self, one.name) for one in fields(LowRank)})

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
        """Options that adapters on parameters cannot have: they are added to the weight, before there is an input."""
        found = {
            "dropout": self.dropout > 0,
            "use_dora": self.use_dora,
            f"init: {self.init}": self.init != "default",
            f"base_precision: {self.base_precision}": self.base_precision in ("nf4", "int8"),
            "stack": self.stack is not None,
        }
        return [f"`{name}`" for name, is_said in found.items() if is_said]
