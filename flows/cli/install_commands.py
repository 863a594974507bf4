"""Installation of what the pipeline's own environment does not have: `lifecycle install`, for those without a checkout.

It does what `make` does in one: environments of other programs beside the own one, and packages for the own one, in the
versions that the pins name; the parts' names are in `stages/core/shipped.py`. uv gets the variables of this process as
they are, so that a proxy (HTTPS_PROXY), a private authority (SSL_CERT_FILE), a private index (UV_DEFAULT_INDEX) count.
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


def pipeline() -> None:
    """Bring the own environment to the pinned versions, with the build of torch for this machine's GPUs, else for CPUs.

    On a CPU, torchvision, which PyPI has for CUDA alone, is made importable; on GPUs there is torchao, for fp8.
    """
    from flows.ledger.machine import gpus

    pins = shipped(PINS)
    own = ("--python", sys.executable)
    _uv("pip", "install", *_torch_backend(), *own, *_pinned("pipeline"))
    added = ["--requirement", str(pins / "fp8.in")] if gpus() else [str(shipped(TORCHVISION))]
    _uv("pip", "install", *own, "--no-deps", *added)


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


def _harness(name: str) -> Callable[[], None]:
    """Return a function that installs a harness into `.venv-NAME`, as the first stage that asks for it does."""

    def install() -> None:
        from stages.harnesses.installation import ENVIRONMENTS

        ENVIRONMENTS[name].make(lambda line: say(line, sys.stderr))

    return install


def reasoning_gym() -> None:
    """Install Reasoning Gym into `.venv-reasoning-gym` beside the own environment."""
    _into(".venv-reasoning-gym", "--requirement", str(shipped(PINS) / "reasoning-gym.txt"))


def _own(name: str) -> Callable[[], None]:
    """Return a function that adds packages, pinned in files of this name, to the own environment."""

    return lambda: _uv("pip", "install", "--python", sys.executable, *_pinned(name))


def _pinned(name: str) -> list[str]:
    pins, wanted = (str(shipped(PINS) / f"{name}.{kind}") for kind in ("txt", "in"))
    return ["--constraints", pins, "--requirement", wanted]


INSTALLERS: dict[str, Callable[[], None]] = {
    "pipeline": pipeline,
    "serve": serve,
    "llama-cpp": llama_cpp,
    "evalscope": _harness("evalscope"),
    "bfcl": _harness("bfcl"),
    "reasoning-gym": reasoning_gym,
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
    python = str(folder / "bin" / "python")
    _uv("pip", "install", "--compile-bytecode", *_torch_backend(), "--python", python, *requirements)


def _torch_backend() -> list[str]:
    """Return uv's option for the build of torch that suits this machine, unless a folder of wheels has one."""
    wheels = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    return [] if wheels else ["--torch-backend=auto"]


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
