"""GGUF: weights, vocabulary and sizes of a model in one file, as `quantize` writes it by `method: gguf`."""

from __future__ import annotations

from pathlib import Path

from stages.core.errors import ModelError

GGUF_FILE = "model.gguf"
"""In a model folder."""
GGUF_MAGIC = b"GGUF"


def files_with_weights(folder: Path) -> list[Path]:
    """All of a model's or an adapter's folder, whatever their format."""
    return sorted(path for path in folder.glob("*") if path.suffix in (".safetensors", ".gguf"))


def holds_gguf(folder: Path) -> bool:
    """Whether the weights of a model folder are in a GGUF file. One beside safetensors is not what is meant."""
    return (folder / GGUF_FILE).is_file() and not any(folder.glob("*.safetensors"))


def check_gguf(path: Path) -> None:
    """Raise ModelError for a file that does not begin as GGUF does; loading it finds what is wrong further on."""
    with path.open("rb") as stream:
        found = stream.read(len(GGUF_MAGIC))
    if found != GGUF_MAGIC:
        raise ModelError(f"{path} begins with {found!r}, expected {GGUF_MAGIC!r}: it is no GGUF file; make it again")
