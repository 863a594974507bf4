"""Keys of people for served models: `keys.json` in a folder of the lifecycle home, readable by its owner alone.

A key is `NAME.SECRET`; of the secret, 256 random bits, the file has a salted hash. It belongs to all model servers of
the home, beside the server's own key (VLLM_API_KEY).
"""

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stages.core.errors import ResourceError, StoreError
from stages.core.files import write_atomically

FOLDER, FILE = "serving-keys", "keys.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_@.-]{0,63}")
MAX_BYTES = 2**22
MAX_TOKENS_A_DAY = 10**15


@dataclass(frozen=True)
class PersonKey:
    """Entry of one person. tokens_a_day: of prompts and answers, None without a limit; times: ISO 8601, UTC."""

    name: str
    salt: str
    digest: str
    added: str
    tokens_a_day: int | None = None
    revoked: str | None = None

    def opens(self, secret: str) -> bool:
        """Return whether a secret is the one of this key, which must not be revoked."""
        return hmac.compare_digest(_digest(self.salt, secret), self.digest) and self.revoked is None


def keys_folder(home: Path) -> Path:
    """Return the folder in a lifecycle home of people's keys, of what they have used, and of the audit log."""
    return home / FOLDER


def read_keys(folder: Path) -> dict[str, PersonKey]:
    """Return the entries by name; none without a file. Raises StoreError for a damaged or unreadable one."""
    path = folder / FILE
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes")
        return {name: PersonKey(name, **entry) for name, entry in json.loads(content).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StoreError(
            f"reading the serving keys in {path}: {error}; restore it, or remove it and add the keys again"
        ) from error


def add_key(folder: Path, name: str, tokens_a_day: int | None = None) -> str:
    """Add a key for a person whose former one, if any, was revoked; return it, which nothing else ever shows.

    Raises StoreError for a name that is invalid or has a key.
    """
    if not NAME.fullmatch(name):
        raise StoreError(f"adding a key for {name!r}: expected up to 64 letters, digits, _, @, . and -")
    secret = secrets.token_urlsafe(32)
    salt = secrets.token_hex(16)
    with _changed(folder) as keys:
        if name in keys and keys[name].revoked is None:
            raise StoreError(
                f"{name} has a key since {keys[name].added}; revoke it first: lifecycle keys revoke {name}"
            )
        keys[name] = PersonKey(name, salt, _digest(salt, secret), _now(), tokens_a_day)
    return f"{name}.{secret}"


def revoke_key(folder: Path, name: str) -> PersonKey:
    """Revoke a person's key; servers refuse it within a second. Raises StoreError if there is none to revoke."""
    with _changed(folder) as keys:
        if name not in keys or keys[name].revoked is not None:
            known = ", ".join(sorted(known for known, key in keys.items() if key.revoked is None)) or "no one"
            raise StoreError(f"{name} has no key to revoke; these have one: {known}")
        keys[name] = replace(keys[name], revoked=_now())
        return keys[name]


def name_in(key: str) -> tuple[str, str]:
    """Split what a client sent as its key into a name and a secret."""
    name, _, secret = key.rpartition(".")
    return name, secret


@contextmanager
def _changed(folder: Path) -> Iterator[dict[str, PersonKey]]:
    """Provide the entries, and write them once the context ends without an error; one process at a time."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / "keys.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = read_keys(folder)
            yield keys
            entries: dict[str, Any] = {name: asdict(key) for name, key in sorted(keys.items())}
            for entry in entries.values():
                del entry["name"]
            write_atomically(folder / FILE, json.dumps(entries, indent=1) + "\n")
            os.chmod(folder / FILE, 0o600)  # noqa: PTH101
    except OSError as error:
        raise ResourceError(f"changing the serving keys in {folder}: {error.strerror}") from error


def _digest(salt: str, secret: str) -> str:
    return hashlib.sha256(f"{salt}{secret}".encode("utf-8", "surrogatepass")).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
