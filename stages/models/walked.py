"""Shape of a model of any family: by formulas, else by a walk through it (`walk`), kept in `$LIFECYCLE_HOME/cache`.

A walk builds the model without weights, and takes seconds, most of them to import Transformers: it runs in a process of
its own, within limits of memory and time. Only Transformers' own classes are built.
"""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stages.core.errors import ModelError
from stages.core.files import write_atomically
from stages.core.redaction import shortened
from stages.models.facts import GPT_FAMILIES, ROTARY_FAMILIES, ModelFacts
from stages.models.model_folder import check_config
from stages.models.shape import ModelShape

PROGRAM = "stages.models.walk_program"
LIMIT_S = 120.0
LARGEST_CONFIG, LARGEST_ANSWER = 2**22, 2**20
"""Largest config.json that is walked, and largest answer that is kept, in bytes."""
LONGEST_REASON = 300
REVISION = 15
"""Number of what a walk measures: answers of another are measured again."""
FAILURE_HOLDS_S = 24 * 3600
"""Time for which a walk that met its limits, after two minutes, is not tried again; busy machines reach them, too."""


def shape_of(facts: ModelFacts, waiting: Callable[[str], None] = lambda _: None) -> ModelShape:
    """Return a model's shape; raise ModelError if its family is unknown, or its config makes no model.

    waiting: gets a line about what takes seconds, where something does.
    """
    check_config(facts, "reading the model's config")
    if (family := facts.config.get("model_type")) is None:
        raise ModelError("reading the model's config: model_type, which names its family, is missing")
    if family in (*ROTARY_FAMILIES, *GPT_FAMILIES):
        return facts.shape
    text = question_about(facts)
    if len(text) > LARGEST_CONFIG:
        raise ModelError(f"measuring the layers of a {family} model: its config has {len(text)} characters")
    kept = answer_to(text)
    if (answer := _read(kept)) is None:
        waiting(
            f"measuring the layers of the {family} model, once for its config.json and this Transformers (some seconds)"
        )
        answer = _ask(kept, text, str(family))
    if error := answer.get("error") or answer.get("failure"):
        raise ModelError(error)
    return ModelShape.from_json(json.dumps(answer["shape"]))


def question_about(facts: ModelFacts) -> str:
    """Return the line that the program is asked about a model."""
    return json.dumps({"config": facts.config, "files": facts.processor_files}, sort_keys=True)


def answer_to(question: str) -> Path:
    """Return the file that keeps the program's answer."""
    key = hashlib.sha256(f"{REVISION} {version('transformers')} {question}".encode()).hexdigest()[:32]
    return Path(os.environ.get("LIFECYCLE_HOME", ".lifecycle")).resolve() / "cache" / "shapes" / f"{key}.json"


def _read(kept: Path) -> dict[str, Any] | None:
    """Return a kept answer; None if there is none, an old failure, or none that this version can read."""
    try:
        with kept.open("rb") as stream:
            answer: dict[str, Any] = json.loads(stream.read(LARGEST_ANSWER))
            age_s = time.time() - os.fstat(stream.fileno()).st_mtime
        if "shape" in answer:
            ModelShape.from_json(json.dumps(answer["shape"]))
    except (OSError, ValueError):
        return None
    holds = {"shape", "error"} | ({"failure"} if age_s < FAILURE_HOLDS_S else set())
    return answer if answer.keys() & holds else None


def _ask(kept: Path, text: str, family: str) -> dict[str, Any]:
    """Walk through the model, and keep the answer; of processes that ask at the same time only one walks."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (answer := _read(kept)) is None:
                answer = _walk(text, family)
                write_atomically(kept, json.dumps(answer))
            return answer
    except OSError:  # a home that cannot be written to: nothing is kept
        return _walk(text, family)


def _walk(text: str, family: str) -> dict[str, Any]:
    """Return the answer of a process that walks, or as `failure` why it gave none, such as at its limits."""
    alone = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    begin = f"measuring the layers of a {family} model from its config.json"
    end = f"; it is tried again after {FAILURE_HOLDS_S // 3600} hours"
    try:
        done = subprocess.run(
            [sys.executable, "-m", PROGRAM],
            input=f"{text}\n".encode(),
            capture_output=True,
            timeout=LIMIT_S,
            env={**os.environ, **alone},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"{begin} took more than {LIMIT_S:g} s{end}"}
    if done.returncode or len(done.stdout) > LARGEST_ANSWER:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        reason = shortened(last[0], LONGEST_REASON)
        return {"failure": f"{begin} failed, maybe at the limits of its memory or time: {reason}{end}"}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
