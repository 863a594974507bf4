"""Python environment of EvalScope, `.venv-evalscope` beside the project's own: its folder, and its installation by uv.

A stage makes it, with versions pinned in a file, when a recipe first asks for EvalScope; the Makefile and `lifecycle
install` before that, and when the pins have changed. It is renamed last: an environment that exists is complete.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from stages.core.cache import cached_folder
from stages.core.errors import ResourceError
from stages.core.redaction import redact
from stages.core.shipped import install_command, shipped
from stages.core.supervised import SupervisedProcess, was_killed
from stages.serving.interpreter import find_package, inherited_environment

PYTHON_VARIABLE = "LIFECYCLE_EVALSCOPE"
SIZE = "1.2 GB"
PINS = shipped("deploy/requirements/evalscope.txt")
PINNED = "evalscope=="
WITH_OPTIONS = "general_vmcq"
"""EvalScope's benchmark of own rows in which one of several options is right, as MMMU has them."""
OF_OWN_ROWS: dict[str, tuple[str, ...]] = {"general_vqa": ("Rouge",), WITH_OPTIONS: ("acc",)}
"""EvalScope's benchmarks for people's own rows: a question set of this name is scored by these metrics.

Another of the first, BLEU, downloads a tokenizer of NLTK.
"""
NAME = ".venv-evalscope"
COMPLETE = ".ready"
"""Marker file, written last into EvalScope's environment; `make` compares its time with that of the pins."""
LOG_FILE = "uv.log"
ASKING_TIMEOUT_S = 30
POLL_INTERVAL_S = 0.5
SHOWN_LINES, SHOWN_CHARACTERS = 4, 1000


def place() -> Path:
    """Return the folder of EvalScope's Python environment, which may not exist yet."""
    return Path(sys.prefix).parent / NAME


def is_made(folder: Path) -> bool:
    """Return whether EvalScope's Python environment in this folder is completely installed."""
    return (folder / COMPLETE).is_file()


def version_to_be_made() -> str:
    """Return EvalScope's pinned version, which `make` would install; raise ResourceError without a file of pins."""
    return _pin(PINS).removeprefix(PINNED)


@functools.cache
def check_can_be_made(pins: Path, folder: Path) -> None:
    """Raise ResourceError if EvalScope cannot be installed: uv, write permission or a package registry is missing."""
    pin = _pin(pins)
    if not os.access(folder.parent, os.W_OK):
        raise ResourceError(_cannot(f"its place is {folder}, and {folder.parent} may not be written to"))
    with tempfile.TemporaryDirectory() as nowhere:
        # One package, which is not installed: only to see whether a registry has it.
        asking = ["--dry-run", "--no-deps", "--target", nowhere, "--python", sys.executable]
        command = [_uv(), "pip", "install", *asking, pin]
        try:
            asked = subprocess.run(
                command, env=_environment(), capture_output=True, text=True, timeout=ASKING_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ResourceError(_cannot(f"no package registry answered within {ASKING_TIMEOUT_S} s")) from error
    if asked.returncode:
        raise ResourceError(_cannot(f"no package registry gives {pin}: {_last_words(asked.stderr)}"))


def _pin(pins: Path) -> str:
    if not pins.is_file():
        raise ResourceError(_cannot(f"{pins} does not exist, which says what belongs into it"))
    return next(word for word in pins.read_text(encoding="utf-8").split() if word.startswith(PINNED))


def make(doing: Callable[[str], None], is_complete: Callable[[Path], bool] = is_made) -> None:
    """Install EvalScope's environment unless it exists, or wait for another caller; ResourceError with uv's message."""
    folder = place()
    if is_complete(folder):
        return
    doing(f"EvalScope's environment is made first, {SIZE}, in {folder}")
    try:
        cached_folder(folder.parent, folder.name, is_complete, lambda partial: _install(partial, doing))
    except OSError as error:
        raise ResourceError(_cannot(f"writing {folder.parent}: {error.strerror or error}")) from error


def _install(partial: Path, doing: Callable[[str], None]) -> None:
    log, python = partial / LOG_FILE, str(partial / "bin" / "python")
    # Relocatable, since the folder is renamed when it is complete; it exists, since uv's log is in it.
    _run([_uv(), "venv", "--relocatable", "--allow-existing", "--python", sys.executable, str(partial)], log, doing)
    _run([_uv(), "pip", "install", "--compile-bytecode", "--python", python, "--requirement", str(PINS)], log, doing)
    partial.chmod(_mode_of_ours())
    (partial / COMPLETE).touch()  # last: it says that all the above is there


def _run(command: list[str], log: Path, doing: Callable[[str], None]) -> None:
    as_ours = ["/bin/sh", "-c", f'umask {0o777 & ~_mode_of_ours():03o}; exec "$@"', "sh"]  # a stage's files are private
    with log.open("ab") as output:
        process = SupervisedProcess([*as_ours, *command], environment=_environment(), output=output)
    shown = ""
    try:
        exit_code = None
        while exit_code is None:
            time.sleep(POLL_INTERVAL_S)
            exit_code = process.poll()
            printed = log.read_text(errors="replace")
            if (last := (_lines(printed) or [""])[-1]) != shown:
                shown = last
                doing(f"installing EvalScope ({SIZE}): {redact(last)}")
    finally:
        process.stop()
    if exit_code:
        reason = _cannot(f"uv ended with exit code {exit_code}: {_last_words(printed)}")
        raise ResourceError(reason, died=was_killed(exit_code))


def _mode_of_ours() -> int:
    """Return the permissions of the project's environment for EvalScope's, whichever user's stage installs it."""
    return Path(sys.executable).parent.stat().st_mode & 0o777


def _uv() -> str:
    uv = Path(sys.executable).with_name("uv")
    if not os.access(uv, os.X_OK):
        raise ResourceError(_cannot(f"{uv} does not exist, which installs it"))
    return str(uv)


def _environment() -> dict[str, str]:
    """Return the environment of uv, with pip's folder of wheels, as uv does not read pip's settings."""
    environment = inherited_environment()
    if "UV_FIND_LINKS" not in environment:
        folders = environment.get("PIP_FIND_LINKS") or _pip_setting("global.find-links")
        environment |= {"UV_FIND_LINKS": ",".join(folders.split())} if folders.strip() else {}
    return environment


@functools.cache
def _pip_setting(name: str) -> str:
    """Return the value of a setting of pip; empty if it is not set."""
    command = [sys.executable, "-m", "pip", "config", "get", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=ASKING_TIMEOUT_S, check=False).stdout


def _cannot(why: str) -> str:
    return (
        f"EvalScope is not installed, and its environment cannot be made: {why}; fix that, make it with "
        f"`{install_command('evalscope')}` ({SIZE}) where the network can be reached, or name its interpreter in "
        f"{PYTHON_VARIABLE}"
    )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _last_words(text: str) -> str:
    return redact(" ".join(_lines(text)[-SHOWN_LINES:]))[-SHOWN_CHARACTERS:]


def _is_current(folder: Path) -> bool:
    return is_made(folder) and (folder / COMPLETE).stat().st_mtime >= PINS.stat().st_mtime


@dataclass(frozen=True)
class InstalledEvalScope:
    """An installed EvalScope. python: interpreter that can import it. package: its folder."""

    python: Path
    package: Path
    version: str

    def benchmarks(self) -> list[str]:
        """Return the names of the benchmarks that EvalScope itself has."""
        return list(json.loads((self.package / "benchmarks" / "_index.json").read_bytes()))


def is_missing() -> bool:
    """Return whether EvalScope must be installed: no interpreter is named, and its environment does not exist."""
    return not os.environ.get(PYTHON_VARIABLE) and not is_made(place())


def find_evalscope() -> InstalledEvalScope:
    """Return the EvalScope of $LIFECYCLE_EVALSCOPE's interpreter, or of `.venv-evalscope`; raise ResourceError."""
    named = os.environ.get(PYTHON_VARIABLE)
    python = Path(named) if named else place() / "bin" / "python"
    if is_missing() or not os.access(python, os.X_OK):
        why = f"{python} is no program" if named else f"{place()} is not there, or was not made to its end"
        raise ResourceError(
            f"EvalScope was not found: {why}; create its environment with `{install_command('evalscope')}` "
            f"({SIZE}), or name its interpreter in {PYTHON_VARIABLE}"
        )
    try:
        installed = find_package(python.absolute(), "evalscope")
    except PackageNotFoundError:
        raise ResourceError(
            f"{python} belongs to no environment with EvalScope; create it again with `{install_command('evalscope')}`"
        ) from None
    return InstalledEvalScope(python.absolute(), installed.site_packages / "evalscope", installed.version)


def main() -> None:
    """Install EvalScope's Python environment in the pinned versions, for the Makefile."""
    try:
        make(lambda progress: print(progress, flush=True), _is_current)
    except ResourceError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
