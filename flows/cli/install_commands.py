"""Installation of what the pipeline's own environment does not have: `lifecycle install`, for those without a checkout.

It does what `make` does in one: environments of other programs beside the own one, and packages for the own one, in the
versions that the pins name. uv gets the variables of this process as they are, so that a proxy (HTTPS_PROXY), a private
authority (SSL_CERT_FILE) and a private index (UV_DEFAULT_INDEX) count.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from stages.core.errors import ResourceError
from stages.core.lines import say
from stages.core.shipped import shipped

PINS = "deploy/requirements"
TORCHVISION = "deploy/torchvision-without-cuda"


def serve() -> None:
    """Install vLLM into `.venv-serve` beside the own environment: for this machine's GPUs, else for CPUs."""
    from flows.ledger.machine import gpus
    from flows.planning.devices import GPU

    pins = shipped(PINS)
    if gpus():
        _into(".venv-serve", "--requirement", str(pins / f"serve-{GPU.name}.txt"))
        return
    overrides = ["--overrides", str(pins / "serve-cpu-overrides.txt")]
    local = [str(shipped("deploy/vllm-metadata")), str(shipped(TORCHVISION))]
    _into(".venv-serve", "--requirement", str(pins / "serve-cpu.txt"), *overrides, *local)


def llama_cpp() -> None:
    """Install llama.cpp into `.venv-llama-cpp` beside the own environment."""
    _into(".venv-llama-cpp", "--requirement", str(shipped(PINS) / "llama-cpp.txt"))


def evalscope() -> None:
    """Install EvalScope into `.venv-evalscope`, as the first stage that asks for it does."""
    from stages.harnesses.evalscope.environment import make

    make(lambda line: say(line, sys.stderr))


def _own(name: str) -> Callable[[], None]:
    """Return a function that adds packages, pinned in files of this name, to the own environment."""

    def install() -> None:
        pins, added = (str(shipped(PINS) / f"{name}.{kind}") for kind in ("txt", "in"))
        _uv("pip", "install", "--python", sys.executable, "--constraints", pins, "--requirement", added)

    return install


INSTALLERS: dict[str, Callable[[], None]] = {
    "serve": serve,
    "llama-cpp": llama_cpp,
    "evalscope": evalscope,
    "media": _own("media"),
    "trackers": _own("trackers"),
    "mcp": _own("mcp"),
    "shared-store": _own("shared-store"),
}
"""Function that installs a part, by the name that people ask for."""


def _into(environment: str, *requirements: str) -> None:
    folder = Path(sys.prefix).parent / environment
    say(f"installing into {folder}", sys.stderr)
    _uv("venv", "--allow-existing", "--python", sys.executable, str(folder))
    backend = [] if os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") else ["--torch-backend=auto"]
    _uv("pip", "install", "--compile-bytecode", *backend, "--python", str(folder / "bin" / "python"), *requirements)


def _uv(*arguments: str) -> None:
    """Run uv with this process's environment. Raises ResourceError where it is missing or fails."""
    uv = Path(sys.executable).with_name("uv")
    if not os.access(uv, os.X_OK):
        raise ResourceError(f"installing packages: {uv} does not exist; `python -m pip install uv` brings it")
    environment = dict(os.environ)
    if "UV_FIND_LINKS" not in environment and environment.get("PIP_FIND_LINKS"):  # uv does not read pip's settings
        environment["UV_FIND_LINKS"] = ",".join(environment["PIP_FIND_LINKS"].split())
    done = subprocess.run([str(uv), *arguments], env=environment)
    if done.returncode:
        raise ResourceError(f"installing packages: uv ended with exit code {done.returncode}; its reason is above")
