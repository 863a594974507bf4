"""What an engine's own parser says of options, asked of a program in its environment; its answers are kept."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.core.files import write_atomically

TIMEOUT_S = 300.0


def problems_by_parser(
    engine: str,
    version: str,
    command: Sequence[str | Path],
    options: Mapping[str, Sequence[str]],
    *,
    at_once: bool = False,
) -> list[str] | None:
    """`OPTION: why`, of what this version of an engine does not take; none where its parser cannot be asked here.

    command: reads options from stdin, as JSON, and prints problems as its last line. options: name → as the command
    line has it. at_once: None for what the parser has not been asked before.
    """
    asked = json.dumps(options, sort_keys=True)
    key = hashlib.sha256(f"{version} {asked}".encode()).hexdigest()[:24]
    home = Path(os.environ.get("LIFECYCLE_HOME", ".lifecycle")).resolve()
    kept = home / "cache" / f"{engine}-arguments" / f"{key}.json"
    if not kept.is_file():
        if at_once:
            return None
        problems = parsed(tuple(command), asked)
        if problems is None:  # a build for GPUs that cannot be imported here: its server says what it does not take
            return []
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(problems))
    found: list[str] = json.loads(kept.read_text())
    return found


@functools.cache
def parsed(command: tuple[str | Path, ...], asked: str) -> list[str] | None:
    """What the program says; None where it cannot run."""
    ended = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if ended.returncode:
        return None
    problems: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return problems
