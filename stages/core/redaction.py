"""Redaction of secrets (API keys, passwords, tokens) in messages, logs and files.

Secrets are values of environment variables that are named like secrets, by which alone they reach a stage, passwords in
URLs, and texts in the form of known services' keys. Messages are redacted where they are made; logs, which many
programs write, when their stage has ended. Time is in proportion to the text. Standard library only.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

REPLACEMENT = "***"
MIN_CHARACTERS = 4
"""Smallest length of a secret. Shorter values of environment variables occur everywhere and are not secrets."""
MIN_CHARACTERS_ANYWHERE = 8
"""Smallest length of a secret that is redacted inside longer words too; a short `main` must not match `remainder`."""

_SECRET_NAME = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_PWD|_PASS|KEY|AUTH_STRING|CREDENTIALS?)$", re.IGNORECASE
)
_SWITCHES = frozenset({"true", "false", "none", "null"})
"""Values that are no secrets although the variable's name suggests it (HF_HUB_DISABLE_IMPLICIT_TOKEN)."""
# Begins at `://` instead of the scheme, and stops at `/`: no character is looked at from two places where it may begin,
# so the time is linear. The last `@` ends the password: a URL's host has none.
_URL_PASSWORD = re.compile(r"(:/{1,2}[^/\s:@]*:)([^/\s\"<>]+)@")  # of one slash where a path was made of it
_KNOWN_SHAPE = re.compile(
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|npm_[A-Za-z0-9]{30,}"
    r"|sk-(?:(?:ant|or|proj)-|(?=[\w-]*\d))[\w-]{20,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{35}|xox[abeprs]-[\w-]{10,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
)
"""Pattern of the API keys of known services, such as Hugging Face, GitHub and AWS, and of JSON web tokens."""
_WEBHOOK = re.compile(r"(hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/)[\w/-]{6,}")
"""Pattern of Slack and Discord webhook addresses, to which anyone who knows them can post."""
_JSON_STRING = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*(?:"|$)(\s*:)?', re.MULTILINE)
"""Pattern of a JSON string, with the colon after it if it is a key. The string may be cut off at the end of a line."""
_WINDOW_CHARACTERS = 64 * 1024
"""Largest number of characters of a text that are searched for secrets before the text is shortened."""
_CUT_URL_PASSWORD = re.compile(r"(:/{1,2}[^/\s:@]*:)[^/\s\"<>@]*$")
"""Pattern of a URL's password at the end of a shortened text, where the `@` after it may be cut off."""
_TEXT_SUFFIXES = (".txt", ".log", ".json", ".jsonl")
_JSON_SUFFIXES = (".json", ".jsonl")


def is_secret_name(name: str) -> bool:
    """Return whether an environment variable's name suggests a secret, such as `HF_TOKEN`."""
    return bool(_SECRET_NAME.search(name))


def holds_url_password(text: str) -> bool:
    """Return whether a text contains a URL with a password."""
    return bool(_URL_PASSWORD.search(text))


def secrets_in(environment: Mapping[str, str]) -> set[str]:
    """Return the secrets of an environment: values of variables with secret names, and passwords in URLs."""
    named = {value.strip() for name, value in environment.items() if is_secret_name(name)}
    passwords = {password for value in environment.values() for _, password in _URL_PASSWORD.findall(value)}
    return {one for one in named | passwords if len(one) >= MIN_CHARACTERS and one.lower() not in _SWITCHES}


def redact(text: str, secrets: Iterable[str] | None = None) -> str:
    """Return the text without secrets (default: of this environment), spelled plainly or as JSON, Python, URL."""
    return _without(text, _spellings(secrets_in(os.environ) if secrets is None else secrets))


def shortened(text: str, max_characters: int) -> str:
    """Return the text without secrets, then cut to `max_characters` with `…`; half a secret would not be recognised."""
    spellings = _spellings(secrets_in(os.environ))
    if len(text) <= _WINDOW_CHARACTERS:
        redacted = _without(text, spellings)
    else:
        window = _without(text[:_WINDOW_CHARACTERS], spellings)
        # A secret may lie across the end of the window, where only its first characters are left.
        window = window[: len(window) - max(map(len, spellings), default=0)]
        redacted = _CUT_URL_PASSWORD.sub(rf"\1{REPLACEMENT}", window) + "…"
    return redacted if len(redacted) <= max_characters else f"{redacted[: max_characters - 1]}…"


def quoted(value: object, max_characters: int) -> str:
    """Return a value (bytes: UTF-8; no text: JSON) quoted, without secrets, shortened, control characters escaped."""
    if isinstance(value, bytes):
        value = value[: 4 * _WINDOW_CHARACTERS].decode(errors="replace")  # a character has at most four bytes
    return repr(shortened(value if isinstance(value, str) else json.dumps(value, default=str), max_characters))


def redact_files(folder: Path, secrets: Iterable[str]) -> None:
    """Remove secrets from the text files at the top of a folder: logs, events, results.

    A log may be open, so it stays the same file. JSON stays JSON: neither keys nor numbers are changed.
    """
    spellings = _spellings(secrets)
    for path in folder.iterdir():
        if path.suffix not in _TEXT_SUFFIXES or path.is_symlink() or not path.is_file():
            continue
        # Bytes that are not UTF-8 are written back as they were.
        text = path.read_bytes().decode(errors="surrogateescape")
        redacted = _without(text, spellings)
        if redacted != text and path.suffix in _JSON_SUFFIXES:
            redacted = _JSON_STRING.sub(lambda match: match[0] if match[1] else _without(match[0], spellings), text)
        if redacted != text:
            path.write_bytes(redacted.encode(errors="surrogateescape"))


def _spellings(secrets: Iterable[str]) -> list[str]:
    """Return all forms in which secrets may appear (plain, or escaped for JSON, Python or a URL), longest first."""
    spellings: set[str] = set()
    for one in secrets:
        spellings |= {one, unquote(one), quote(one.encode(errors="surrogateescape"), safe=""), repr(one)[1:-1]}
        for ensure_ascii in (True, False):
            escaped = json.dumps(one, ensure_ascii=ensure_ascii)[1:-1]
            spellings |= {escaped, json.dumps(escaped)[1:-1]}  # the second: JSON quoted within JSON
    return sorted(spellings, key=len, reverse=True)


def _without(text: str, spellings: Iterable[str]) -> str:
    for spelling in spellings:
        if spelling not in text:
            continue
        if len(spelling) >= MIN_CHARACTERS_ANYWHERE:
            text = text.replace(spelling, REPLACEMENT)
        else:
            # No letter or digit beside it; an underscore may be.
            text = re.sub(rf"(?<![^\W_]){re.escape(spelling)}(?![^\W_])", REPLACEMENT, text)
    text = _WEBHOOK.sub(rf"\1{REPLACEMENT}", _KNOWN_SHAPE.sub(REPLACEMENT, text))
    # Not `sub`, which fills its template in Python: a text of passwords alone took three times as long.
    parts = _URL_PASSWORD.split(text)  # text, beginning of a URL, password, text, …, text
    parts[2::3] = [f"{REPLACEMENT}@"] * (len(parts) // 3)
    return "".join(parts)
