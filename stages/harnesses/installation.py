"""Python environments of harnesses that cannot share ours, such as `.venv-evalscope`, and their installation by uv.

A stage makes one, with versions pinned in a file, when a recipe first asks for its harness; the Makefile and `lifecycle
install` before that, and when the pins have changed. It is renamed last: an environment that exists is complete.
"""

import functools
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

PINS = shipped("deploy/requirements")
COMPLETE = ".ready"
"""Marker file, written last into an environment; `make` compares its time with that of the pins."""
LOG_FILE = "uv.log"
ASKING_TIMEOUT_S = 30
POLL_INTERVAL_S = 0.5
SHOWN_LINES, SHOWN_CHARACTERS = 4, 1000


@dataclass(frozen=True)
class InstalledHarness:
    """Installed package of a harness. python: interpreter that can import it. package: its folder."""

    python: Path
    package: Path
    version: str


@dataclass(frozen=True)
class HarnessEnvironment:
    """Python environment of a harness, `.venv-NAME` beside the project's own.

    name: of `make NAME` and `lifecycle install NAME`. title: of the harness in messages. distribution, module: names of
    its package, for installers and for imports. size: on disk, in words. variable: environment variable that may name
    another environment's interpreter.
    """

    name: str
    title: str
    distribution: str
    module: str
    size: str
    variable: str

    @property
    def pins(self) -> Path:
        return PINS / f"{self.name}.txt"

    @property
    def place(self) -> Path:
        """Folder of the environment, which may not exist yet."""
        return Path(sys.prefix).parent / f".venv-{self.name}"

    @property
    def is_made(self) -> bool:
        return _is_complete(self.place)

    @property
    def is_missing(self) -> bool:
        """True if it must be installed: no interpreter is named, and its environment does not exist."""
        return not os.environ.get(self.variable) and not self.is_made

    def version(self) -> str:
        """Return the installed version, or the pinned one, which is enough for existing scores; else ResourceError."""
        return self._pin().removeprefix(f"{self.distribution}==") if self.is_missing else self.find().version

    def to_install(self) -> str | None:
        """Return what `make` will install, with folder and size, or None; raise ResourceError if it cannot."""
        if not self.is_missing:
            return None
        check_can_be_made(self, self.place)
        return f"{self.title} is not installed: its environment, {self.size}, is made first, in {self.place}"

    def find(self) -> InstalledHarness:
        """Return the package of the interpreter that `variable` names, or of the own environment; ResourceError."""
        named = os.environ.get(self.variable)
        python = Path(named) if named else self.place / "bin" / "python"
        if self.is_missing or not os.access(python, os.X_OK):
            why = f"{python} is no program" if named else f"{self.place} is not there, or was not made to its end"
            raise ResourceError(
                f"{self.title} was not found: {why}; create its environment with `{install_command(self.name)}` "
                f"({self.size}), or name its interpreter in {self.variable}"
            )
        try:
            installed = find_package(python.absolute(), self.distribution)
        except PackageNotFoundError:
            raise ResourceError(
                f"{python} belongs to no environment with {self.title}; create it again with "
                f"`{install_command(self.name)}`"
            ) from None
        return InstalledHarness(python.absolute(), installed.site_packages / self.module, installed.version)

    def make(self, doing: Callable[[str], None], *, again_for_newer_pins: bool = False) -> None:
        """Install the environment unless it exists, or wait for another caller; ResourceError with uv's message."""
        is_complete = self._is_current if again_for_newer_pins else _is_complete
        folder = self.place
        if is_complete(folder):
            return
        doing(f"{self.title}'s environment is made first, {self.size}, in {folder}")
        try:
            cached_folder(folder.parent, folder.name, is_complete, lambda partial: self._install(partial, doing))
        except OSError as error:
            raise ResourceError(self._cannot(f"writing {folder.parent}: {error.strerror or error}")) from error

    def _pin(self) -> str:
        if not self.pins.is_file():
            raise ResourceError(self._cannot(f"{self.pins} does not exist, which says what belongs into it"))
        words = self.pins.read_text(encoding="utf-8").split()
        return next(word for word in words if word.startswith(f"{self.distribution}=="))

    def _install(self, partial: Path, doing: Callable[[str], None]) -> None:
        log, python = partial / LOG_FILE, str(partial / "bin" / "python")
        # Relocatable, since the folder is renamed when it is complete; it exists, since uv's log is in it.
        venv = ["venv", "--relocatable", "--allow-existing", "--python", sys.executable, str(partial)]
        overrides = self.pins.with_name(f"{self.name}-overrides.txt")
        install = ["pip", "install", "--compile-bytecode", "--python", python, "--requirement", str(self.pins)]
        self._run([self._uv(), *venv], log, doing)
        self._run([self._uv(), *install, *(["--overrides", str(overrides)] if overrides.exists() else [])], log, doing)
        partial.chmod(_mode_of_ours())
        (partial / COMPLETE).touch()  # last: it says that all the above is there

    def _run(self, command: list[str], log: Path, doing: Callable[[str], None]) -> None:
        as_ours = ["/bin/sh", "-c", f'umask {0o777 & ~_mode_of_ours():03o}; exec "$@"', "sh"]  # a stage's are private
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
                    doing(f"installing {self.title} ({self.size}): {redact(last)}")
        finally:
            process.stop()
        if exit_code:
            reason = self._cannot(f"uv ended with exit code {exit_code}: {_last_words(printed)}")
            raise ResourceError(reason, died=was_killed(exit_code))

    def _uv(self) -> str:
        uv = Path(sys.executable).with_name("uv")
        if not os.access(uv, os.X_OK):
            raise ResourceError(self._cannot(f"{uv} does not exist, which installs it"))
        return str(uv)

    def _cannot(self, why: str) -> str:
        return (
            f"{self.title} is not installed, and its environment cannot be made: {why}; fix that, make it with "
            f"`{install_command(self.name)}` ({self.size}) where the network can be reached, or name its interpreter "
            f"in {self.variable}"
        )

    def _is_current(self, folder: Path) -> bool:
        return _is_complete(folder) and (folder / COMPLETE).stat().st_mtime >= self.pins.stat().st_mtime


EVALSCOPE = HarnessEnvironment("evalscope", "EvalScope", "evalscope", "evalscope", "1.2 GB", "LIFECYCLE_EVALSCOPE")
BFCL = HarnessEnvironment("bfcl", "BFCL", "bfcl-eval", "bfcl_eval", "550 MB", "LIFECYCLE_BFCL")
ENVIRONMENTS = {one.name: one for one in (EVALSCOPE, BFCL)}


@functools.cache
def check_can_be_made(environment: HarnessEnvironment, folder: Path) -> None:
    """Raise ResourceError if it cannot be installed: uv, write permission or a package registry is missing."""
    pin = environment._pin()
    if not os.access(folder.parent, os.W_OK):
        raise ResourceError(environment._cannot(f"its place is {folder}, and {folder.parent} may not be written to"))
    with tempfile.TemporaryDirectory() as nowhere:
        # One package, which is not installed: only to see whether a registry has it.
        asking = ["--dry-run", "--no-deps", "--target", nowhere, "--python", sys.executable]
        command = [environment._uv(), "pip", "install", *asking, pin]
        try:
            asked = subprocess.run(
                command, env=_environment(), capture_output=True, text=True, timeout=ASKING_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ResourceError(
                environment._cannot(f"no package registry answered within {ASKING_TIMEOUT_S} s")
            ) from error
    if asked.returncode:
        raise ResourceError(environment._cannot(f"no package registry gives {pin}: {_last_words(asked.stderr)}"))


def _is_complete(folder: Path) -> bool:
    """Return whether the environment in this folder is completely installed."""
    return (folder / COMPLETE).is_file()


def _mode_of_ours() -> int:
    """Return the permissions of the project's environment for a harness's, whichever user's stage installs it."""
    return Path(sys.executable).parent.stat().st_mode & 0o777


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


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _last_words(text: str) -> str:
    return redact(" ".join(_lines(text)[-SHOWN_LINES:]))[-SHOWN_CHARACTERS:]


def main(name: str) -> None:
    """Install a harness's Python environment in the pinned versions, for the Makefile."""
    try:
        ENVIRONMENTS[name].make(lambda progress: print(progress, flush=True), again_for_newer_pins=True)
    except ResourceError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
