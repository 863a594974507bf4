"""A quicker start of the processes that build models."""

from __future__ import annotations

import sys
from typing import Any

from transformers.utils import is_scipy_available, is_sklearn_available


def hide_unused_packages() -> None:
    """Have Transformers take scikit-learn and SciPy for missing, so that models do not import them, for over a second.

    It uses them for assisted generation and for losses of object detection only. Everybody else finds them as before.
    """
    names = ("sklearn", "scipy")
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    missing: dict[str, Any] = dict.fromkeys(names)  # None means: there is no such package
    sys.modules.update(missing)
    try:
        for is_available in (is_sklearn_available, is_scipy_available):
            is_available.cache_clear()
            is_available()  # it remembers the answer
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)
