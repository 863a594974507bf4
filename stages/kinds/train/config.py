"""Config of a training stage, with its cache key; `fields.py` has the fields and `checks.py` their checks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from pydantic import JsonValue, model_validator
from pydantic_core import PydanticCustomError

from stages.core.contract import ModelAtHand, Reported, StageConfig, base_of
from stages.core.errors import LifecycleError
from stages.core.fields import without
from stages.kinds.train import at_hand, checks
from stages.kinds.train.fields import TrainFields
from stages.kinds.train.methods.rollouts import NOT_LEARNED_FROM
from stages.parallel.layout import EngineName, Layout
from stages.parallel.legality import is_legal

LAYOUT_PROBLEM = "layout"
"""Type name of pydantic's validation errors about a parallel layout, so that code can recognise them."""


class TrainConfig(TrainFields):
    """Training of a model by one of several methods, each with its own block of options; writes `model/`.

    With `adapter:` low-rank weights learn, written to `adapter/`; `reward` writes `reward_model/`.
    """

    STAGE_VERSION: ClassVar[int] = 2
    PRODUCTS = ("model", "adapter", "reward_model")
    HAS_CHECK: ClassVar[bool] = True
    REPORTED = Reported(
        measured={
            "real_tokens_per_s": "tokens/s",
            "mfu": "MFU",
            "step_time_s": "s/step",
            "predicted_step_time_s": "predicted s/step",
            "peak_memory_gib": "peak GiB",
            "predicted_memory_gib": "predicted GiB",
        },
        counts_data=True,
        not_data=("data_wait_fraction", "communication_fraction", "pipeline_bubble_fraction"),
        curves=True,
    )
    RELATION = "finetune"
    LEARNS = True
    SPANS_NODES = True
    GPU_FOR_EACH_PROCESS = True
    LESS_MEMORY: ClassVar[str] = "lower layout.micro_batch_size or data.sequence_length, or say layout.recompute: full"

    def device_roles(self, variable: str, devices: Sequence[str]) -> str | None:
        if self.colocated_server:
            return f"{self.processes} device{'s' * (self.processes > 1)} in turns for training and sampling"
        if not self.sampling_devices:
            return None
        training = "1 device trains" if self.processes == 1 else f"{self.processes} devices train"
        sampling = "1 samples" if self.sampling_devices == 1 else f"{self.sampling_devices} sample"
        sentence = f"{training}, {sampling} completions"
        if not devices:
            return sentence
        own, others = (",".join(part) for part in (devices[: self.processes], devices[self.processes :]))
        return f"{sentence}: {variable} {own} and {others}"

    def missing_here(self, gpus: Sequence[str]) -> Iterator[str]:
        yield from checks.machine_problems(self, gpus)

    def identity(self) -> dict[str, JsonValue]:
        """Return the fields that enter the cache key: all that can change the trained weights.

        `decay_norms_and_biases` enters only where weights decay, the steps between evaluations only for `keep: best`.
        Where completions are sampled does not enter: it decides about devices and speed, as `execution` does, and
        stands beside the server's other options, which may change the completions.
        """
        where = {f"{self.sampling_block}.{field}" for field in NOT_LEARNED_FROM} if self.sampling else set()
        identity = without(super().identity(), where)
        if self.keep == "best":
            identity["evaluate_every_steps"] = self.execution.evaluate_every_steps
        return identity if self.weight_decay else without(identity, {"decay_norms_and_biases"})

    def completed_among(self, stages: Mapping[str, StageConfig]) -> Self:
        is_adapter = stages[self.model].product == "adapter"
        return self.model_copy(update={"base": self.base or base_of(self.model, stages)}) if is_adapter else self

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        yield from checks.input_problems(self, stages)

    def model_findings(
        self, find_model: Callable[[], ModelAtHand | None], gpu_type: str | None
    ) -> Iterator[tuple[str, LifecycleError | str]]:
        yield from at_hand.model_findings(self, find_model, gpu_type)

    def first_problems(
        self, find_model: Callable[[], Path | None], find_dataset: Callable[[str], Path | None]
    ) -> Iterator[str]:
        yield from at_hand.first_problems(self, find_model, find_dataset)

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        yield from super().idle_fields()
        yield from checks.idle_fields(self)

    def custom_code(self) -> tuple[str, ...]:
        rewards = self.rollouts.rewards if self.rollouts else {}
        own = ((name, reward.custom_code()) for name, reward in rewards.items())
        found = [f"{self.method}.rewards.{name}: {code}" for name, code in own if code]
        for part in self.acting.values():
            if part.options.environment and (code := part.options.environment.custom_code()):
                found.append(f"{self.method}.{part.field}: {code}")
        return (*super().custom_code(), *found)

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        """Return the versions of what samples and judges completions, for the cache key; empty without sampling."""
        packages: dict[str, JsonValue] = {}
        for part in self.acting.values():
            packages |= part.options.environment.versions() if part.options.environment else {}
        return {**self.sampling.engine_version, **packages} if self.sampling else {}

    def progress_kept(self, scratch: Path) -> int:
        """Return the training step of the latest complete checkpoint (`step-N`) in a scratch folder, or 0."""
        steps = (path.name.removeprefix("step-") for path in (scratch / "checkpoints").glob("step-*"))
        return max(map(int, steps), default=0)

    def resume_identity(self) -> dict[str, JsonValue]:
        """Return the fields that must be equal to resume: those of the cache key without engine and layout."""
        return {key: value for key, value in self.identity().items() if key not in ("engine", "layout")}

    def allows(self, engine: EngineName, layout: Layout) -> bool:
        """Return whether the other fields go with a parallel layout of an engine."""
        other = self.model_copy(update={"engine": engine, "layout": layout})
        goes = is_legal(engine, layout, other.constraints, None, self.features())
        return goes and not any(checks.engine_errors(other))

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        for errors in checks.config_errors(self):
            if errors:
                raise ValueError("; ".join(errors))
        if problems := "; ".join(checks.layout_problems(self)):
            raise PydanticCustomError(LAYOUT_PROBLEM, "{problems}", {"problems": problems})
        return self
