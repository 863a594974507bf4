"""Finds in llama.cpp's log why the server did not start: the first error; those after it are its consequences."""

from __future__ import annotations

import re

from stages.core.redaction import shortened

ERROR = re.compile(r"^[\d.]+ E (.+)$", re.MULTILINE)
"""Such as `0.00.567.051 E llama_model_load: error loading model: tensor … not within the file bounds`."""
PYTHON = re.compile(r"^(?:server_program\.py: error: .+|[A-Za-z_.]*(?:Error|Exception): .+)$", re.MULTILINE)
GENERIC = "please check the input params"
MAX_CHARACTERS = 600


def find_root_cause(log: str) -> str | None:
    """None when the log does not say."""
    found = [" ".join(match.split()) for match in ERROR.findall(log)]
    found += [line for line in PYTHON.findall(log) if GENERIC not in line]
    return shortened(" ".join(found[0].split()), MAX_CHARACTERS) if found else None
