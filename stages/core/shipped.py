"""Files beside the code of a checkout: recipes, templates, pinned packages. A wheel has copies of them (`setup.py`)."""

from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
IN_WHEEL = Path(__file__).parents[1] / "shipped"


def shipped(path: str) -> Path:
    """Return the path of a shipped file or folder, by its path in the repository."""
    return (IN_WHEEL if IN_WHEEL.exists() else CHECKOUT) / path
