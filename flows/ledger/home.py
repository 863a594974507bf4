"""Where this project keeps what it makes: LIFECYCLE_HOME, `.lifecycle` in the current folder by default."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The folder of the store, the local servers and the ledgers of refreshes. It need not exist yet."""
    return Path(os.environ.get("LIFECYCLE_HOME", ".lifecycle")).absolute()


def store_root() -> Path:
    """Where artifacts are."""
    return home() / "store"


def hardware_file() -> Path:
    """The description of this machine's devices that predictions start from, if there is one."""
    return Path(os.environ.get("LIFECYCLE_HARDWARE", home() / "hardware.yaml")).absolute()


def ledger_root() -> Path:
    """Where the ledgers of refreshes are, a folder each."""
    return home() / "ledger"
