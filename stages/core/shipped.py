"""Files beside the code of a checkout: recipes, templates, pinned packages. A wheel has copies of them (`setup.py`)."""

from collections.abc import Mapping
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
IN_WHEEL = Path(__file__).parents[1] / "shipped"
MAKE_TARGETS: Mapping[str, str] = {
    "pipeline": "environments",
    "serve": "environments",
    **{
        part: part
        for part in ("llama-cpp", "evalscope", "bfcl", "reasoning-gym", "media", "trackers", "mcp", "shared-store")
    },
}
"""Target of the Makefile that installs a part, by the name that `lifecycle install` knows the part by."""


def shipped(path: str) -> Path:
    """Return the path of a shipped file or folder, by its path in the repository."""
    return (IN_WHEEL if IN_WHEEL.exists() else CHECKOUT) / path


def install_command(part: str) -> str:
    """Return the command that installs a part of `MAKE_TARGETS`, for messages: that of a checkout, or of a wheel."""
    return f"lifecycle install {part}" if IN_WHEEL.exists() else f"make {MAKE_TARGETS[part]}"
