"""Registry of the quantization methods, and the protocol of a quantizer; a new method is a line here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stages.core.errors import ModelError
from stages.serving.engine import Quantization, WeightFormat
from stages.serving.registry import engine_of

if TYPE_CHECKING:
    from stages.data.media.folder import MediaFolder
    from stages.data.media_reference import MediaReference
    from stages.models.media import MediaKind
    from stages.models.processor import MediaProcessor


@dataclass(frozen=True)
class RowPictures:
    """Media of rows, decoded when a row is asked for. media: of each row that has some, by its number."""

    media: Mapping[int, Sequence[MediaReference]]
    folder: MediaFolder
    processor: MediaProcessor

    @property
    def kinds(self) -> set[MediaKind]:
        return {medium.kind for media in self.media.values() for medium in media}

    def inputs(self, number: int, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the model's arguments (tensors) for a row; raise DataError for a medium that has changed."""
        return self.processor.inputs(token_ids, [self.folder.load(one, self.processor) for one in self.media[number]])


@dataclass(frozen=True)
class QuantizationJob:
    """Job for a quantizer: the model folder `source`, the new folder `target`, and how to quantize.

    samples: token ids, a list a row. pictures: of all these rows; None for rows of text. report: called as
    report(done, total), with layers that were calibrated.
    """

    source: Path
    target: Path
    quantization: Quantization
    samples: list[list[int]]
    seed: int
    trust_remote_code: bool
    report: Callable[[int, int], None]
    pictures: RowPictures | None = None


class Quantizer(Protocol):
    """Protocol of a quantizer: the function `quantize` of a method's module."""

    def __call__(self, job: QuantizationJob) -> Sequence[ModelError]:
        """Quantize `job.source` into `job.target`, copy all other files, and return the problems of what was written.

        Bit-identical for the same folder, samples, seed and machine. Raises ModelError for what cannot be written.
        """


@dataclass(frozen=True)
class MethodEntry:
    """Quantization method: its weight format, the module that implements it, and the engine that serves the result.

    weights: None where the recipe names the format. module: has the function `quantize`; imported when used.
    """

    weights: WeightFormat | None
    module: str
    engine: str = "vllm"
    loses_towers: str | None = None
    """Why a model that sees cannot be quantized so, as a clause; None: its tower stays as it is."""
    idle: tuple[tuple[str, str], ...] = ()
    """Fields of the recipe that have no effect, each with the reason."""
    use_of_rows: str = "calibrated with"
    """Verb, in messages, for what quantizing takes the rows for."""
    check: Callable[[Path], None] = lambda _: None
    """Function that raises a LifecycleError for a model folder, or a machine, of which only this method asks more."""


def _check_tokenizer(folder: Path) -> None:
    """Raise ModelError for a tokenizer that llama.cpp lacks, ResourceError without llama.cpp, which is compared."""
    from stages.kinds.quantize.gguf_tokenizer import splitting_of

    splitting_of(folder)
    engine_of("llama_cpp").find_program()


METHODS: dict[str, MethodEntry] = {
    "awq": MethodEntry("int4", "stages.kinds.quantize.llm_compressor"),
    "gptq": MethodEntry("int4", "stages.kinds.quantize.llm_compressor"),
    "int8": MethodEntry("int8", "stages.kinds.quantize.llm_compressor"),
    "fp8": MethodEntry("fp8", "stages.kinds.quantize.llm_compressor"),
    "gguf": MethodEntry(
        None,
        "stages.kinds.quantize.gguf_file",
        "llama_cpp",
        loses_towers="a GGUF file has no place for the tower of a model that sees: llama.cpp reads it from a second "
        "file (mmproj), which nothing here writes",
        idle=(
            ("tensor_parallel_size", "llama.cpp divides no layers"),
            ("seed", "`method: gguf` draws no random numbers"),
        ),
        use_of_rows="whose tokens are compared in",
        check=_check_tokenizer,
    ),
}


def quantizer_of(method: str) -> Quantizer:
    """Return the function that implements a quantization method."""
    quantizer: Quantizer = importlib.import_module(METHODS[method].module).quantize
    return quantizer
