"""The models and datasets that the project makes itself: no network, and the same bytes every time.

Light on purpose: a recipe is checked against this list before anything heavy is imported. A maker is a module with a
function `make(folder: Path) -> None`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Builtin:
    """One thing that the project makes."""

    product: Literal["model", "dataset"]
    module: str
    version: int
    """Raised when the maker would write other content than before."""


BUILTINS: dict[str, Builtin] = {
    "qwen3-1m": Builtin("model", "stages.download.builtin.qwen3", version=2),
    "addition": Builtin("dataset", "stages.download.builtin.addition", version=1),
    "addition-preferences": Builtin("dataset", "stages.download.builtin.addition_preferences", version=1),
}
