"""Takes secrets out of texts: values of environment variables that are named like secrets, and passwords in URLs.

A secret reaches a stage only through its environment. Messages are redacted where they are made; logs, which many
programs write, when their stage has ended. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

REPLACEMENT = "***"
MIN_CHARACTERS = 8
"""Shorter values are no secrets, and are found everywhere."""

_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?)$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:([^/\s@]+)@", re.IGNORECASE)
_TEXT_SUFFIXES = (".txt", ".log", ".json", ".jsonl")


def is_secret_name(name: str) -> bool:
    """Whether a variable is named like a secret."""
    return bool(_SECRET_NAME.search(name))


def secrets_in(environment: Mapping[str, str]) -> set[str]:
    """Values of variables that are named like secrets, and the passwords in URLs of all others."""
    named = {value for name, value in environment.items() if is_secret_name(name)}
    passwords = {found for value in environment.values() for found in _URL_PASSWORD.findall(value)}
    return {secret for secret in named | passwords if len(secret) >= MIN_CHARACTERS}


def redact(text: str, secrets: Iterable[str] | None = None) -> str:
    """`text` without the secrets (default: those of this process's environment) and without any URL's password."""
    for secret in sorted(secrets_in(os.environ) if secrets is None else secrets, key=len, reverse=True):
        text = text.replace(secret, REPLACEMENT)
    return _URL_PASSWORD.sub(lambda match: match[0].replace(f":{match[1]}@", f":{REPLACEMENT}@"), text)


def redact_files(folder: Path, secrets: Iterable[str]) -> None:
    """Rewrite the texts at the top of a folder that hold a secret: logs, events, results. A log may be open: it stays
    the same file.
    """
    found = [secret.encode() for secret in secrets]
    for path in folder.iterdir():
        if path.suffix not in _TEXT_SUFFIXES or path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if any(secret in content for secret in found):
            for secret in found:
                content = content.replace(secret, REPLACEMENT.encode())
            path.write_bytes(content)
