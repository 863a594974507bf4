"""What an engine's own parser says of options, asked of a program in its environment; its answers are kept."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.core.cache_entries import note_use
from stages.core.files import write_atomically
from stages.core.redaction import shortened

TIMEOUT_S = 300.0
REASON_CHARACTERS = 200


@dataclass(frozen=True)
class NotAsked:
    """Nothing is known of options. why: what follows `whether ENGINE takes them`."""

    why: str


LATER = NotAsked("is asked when it runs")


def problems_by_parser(
    engine: str,
    version: str,
    command: Sequence[str | Path],
    options: Mapping[str, Sequence[str]],
    *,
    at_once: bool = False,
) -> list[str] | NotAsked:
    """`OPTION: why`, of what this version of an engine does not take; or why its parser has not said so.

    command: reads options from stdin, as JSON, and prints problems as its last line. options: name → as the command
    line has it. at_once: the parser is not asked what it has not been asked before. Where it cannot run, that is not
    kept: it is tried again.
    """
    asked = json.dumps(options, sort_keys=True)
    key = hashlib.sha256(f"{version} {asked}".encode()).hexdigest()[:24]
    home = Path(os.environ.get("LIFECYCLE_HOME", ".lifecycle")).resolve()
    kept = home / "cache" / f"{engine}-arguments" / f"{key}.json"
    if not kept.is_file():
        if at_once:
            return LATER
        problems = parsed(tuple(command), asked)
        if isinstance(problems, NotAsked):
            return problems
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(problems))
    note_use(kept)
    found: list[str] = json.loads(kept.read_text())
    return found


@functools.cache
def parsed(command: tuple[str | Path, ...], asked: str) -> list[str] | NotAsked:
    """What the program says; why not, where it cannot run: a build for GPUs may not be imported without one."""
    try:
        ended = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return _unable(f"no answer within {TIMEOUT_S:g} s")
    if ended.returncode:
        said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        return _unable(shortened(said[-1], REASON_CHARACTERS) if said else f"exit status {ended.returncode}")
    problems: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return problems


def _unable(reason: str) -> NotAsked:
    return NotAsked(
        f"was not checked: its parser does not run here ({reason}); its server says at its start what it does not take"
    )
