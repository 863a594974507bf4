"""The files of `make gpu-kit` suffice for training on a machine with torch, Transformers, PEFT and pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OF_THE_MACHINE = ("torch", "transformers", "peft", "pytest")
TESTS = ("tests/gpu/test_methods_on_gpu.py", "-k", "fsdp")
KIT = ROOT / "deploy/requirements/gpu-kit.in"


def test_the_tests_for_gpus_need_nothing_but_the_kit(tmp_path: Path) -> None:
    """The GPU tests need only the packages of `make gpu-kit` and of the GPU machine; here they run on a CPU."""
    kit = [line for line in KIT.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    site = tmp_path / "site"
    site.mkdir()
    for name in {*kit, *_with_dependencies(OF_THE_MACHINE)}:
        for top in {file.parts[0] for file in distribution(name).files or () if file.parts[0] != ".."}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(distribution(name).locate_file(top))))
    python = Path(sys.executable).resolve()  # which knows nothing of this environment, nor do processes that it starts
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", tmp_path / "t", *TESTS],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{site}", "TESTS_GPU_ON": "cpu", "PYTEST_ADDOPTS": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def _with_dependencies(names: tuple[str, ...]) -> set[str]:
    """Return the names of packages and of all their installed dependencies, without extras."""
    found: set[str] = set()
    remaining = [*names]
    while remaining:
        name = remaining.pop()
        if name in found:
            continue
        try:
            requires = distribution(name).requires or ()
        except PackageNotFoundError:  # CUDA's, on a machine without
            continue
        found.add(name)
        wanted = map(Requirement, requires)
        remaining += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found
