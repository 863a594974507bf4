"""`deploy/gpu-kit.sh` runs on a CPU without network, under torch 2.11's names, with torch, pytest and the kit alone.

In `make test` some of its parts; all of them are nightly.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from xml.etree import ElementTree

import pytest
from packaging.requirements import Requirement

from flows.compare.calibration import why_left_out
from flows.tracking.logged_runs import measured_runs

ROOT = Path(__file__).parents[2]
OF_THE_MACHINE = ("torch", "numpy", "pytest")
KIT = ROOT / "deploy/requirements/gpu-kit.in"
ON_GPUS = ("fla-core", "flash-linear-attention", "nvidia-ml-py")
"""Packages of the kit that a machine without a GPU does not need to have installed."""
TORCH_2_11 = '''
"""Take from torch, when it is imported, what version 2.11 lacks and the project uses."""
import importlib.util, sys

MODULE, OWNER, NAME = "torch.distributed.fsdp", "FSDPModule", "set_reduce_scatter_unused_params"

class Older:
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def run_and_delete(module):
            run(module)
            delattr(getattr(module, OWNER), NAME)
        spec.loader.exec_module = run_and_delete
        return spec

sys.meta_path.insert(0, Older())
'''
"""Source of a `sitecustomize`. Names were compared with those of 2.11's wheel; of `varlen_attn`, whose `enable_gqa` it
lacks, a CPU has no kernel."""
WITHOUT_NETWORK = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
QUICK = ("narrow 128 full fsdp none", "narrow 128 full fsdp none fp8", "tests")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Provide a folder `site` with links to the packages that a machine for GPUs and the kit have, and no others."""
    kit = [line for line in KIT.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    site = tmp_path / "site"
    site.mkdir()
    for name in {*kit, *_with_dependencies(OF_THE_MACHINE)} - set(ON_GPUS):
        for top in {file.parts[0] for file in distribution(name).files or () if file.parts[0] != ".."}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(distribution(name).locate_file(top))))
    (site / "sitecustomize.py").write_text(TORCH_2_11)
    (site / "ready").touch()  # no wheels are installed: those of the kit are for another Python
    if subprocess.run([*WITHOUT_NETWORK, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make network namespaces")
    return tmp_path


def run(machine: Path, *arguments: str, tests: str = "") -> tuple[str, dict[str, dict]]:
    """Run the kit's command on the machine, with pytest's options `tests`; return its output and results by name."""
    names = {"WORK": machine, "RESULTS": machine / "results", "OUT": machine / "out", "MODELS": machine / "models"}
    for folder in ("results", "out"):
        (machine / folder).mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    environment |= {"PYTHON": os.path.realpath(sys.executable), "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": tests}
    done = subprocess.run(
        [*WITHOUT_NETWORK, ROOT / "deploy/gpu-kit.sh", "--device", "cpu", *arguments],
        env=environment | {name: str(path) for name, path in names.items()} | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((machine / "results/gpu.json").read_text())}
    assert rows == {row["name"]: row for row in json.loads((machine / "out/gpu.json").read_text())}
    return done.stdout, rows


def test_parts_run_with_nothing_but_the_kit_and_once(machine: Path) -> None:
    chosen = [part for name in QUICK for part in ("--only", name)]
    first, rows = run(machine, *chosen, tests="-k log_probabilities_equal")
    assert rows["preflight"]["status"] == "ready" and rows["preflight"]["rates"]["bfloat16 TFLOP/s"] > 0
    assert rows["narrow 128 full fsdp none fp8"]["status"] == "skipped"
    row = rows[QUICK[0]]
    assert row["status"] == "measured" and "ending" not in row, row
    assert rows["tests"]["status"] == "passed", rows["tests"]
    # The report counts them, not the last line, in which plugins of the machine's own Python add their warnings.
    cases = [*ElementTree.parse(machine / "out/gpu.xml").getroot().iter("testcase")]
    assert [case.get("file") for case in cases] == ["tests/gpu/test_kernels_on_gpu.py"] * 2
    assert not [child for case in cases for child in case], "a test failed or was skipped"
    assert first.splitlines()[-1] == "nothing is left to do"
    assert not (machine / "models").exists()
    metrics, layer = row["metrics"], row["layer_ms"]
    assert metrics["tokens_per_s"] * metrics["step_time_s"] == pytest.approx(2 * 128)
    assert metrics["mfu"] > 0 and len(row["steps_s"]) == 5
    # 7 matrices of a layer, with two products each in the backward pass, in 2 micro-batches
    assert layer["launches"]["products"] == 7 * 3 * 2
    assert f"| {QUICK[0]} |" in (machine / "out/gpu.md").read_text()
    runs = measured_runs(machine / "out/gpu.json")
    assert [why_left_out(one) for one in runs] == [None]
    # Another machine, with what was taken along: it has nothing left to do, not even a preflight.
    (machine / "gpu.json").unlink()
    again, rows_again = run(machine, *chosen)
    assert ": measured" not in again and "preflight: ready" not in again
    assert rows_again == rows


@pytest.mark.nightly
def test_every_part_runs_with_nothing_but_the_kit(machine: Path) -> None:
    output, rows = run(machine, "--limit-s", "7200")
    assert output.splitlines()[-1] == "nothing is left to do"
    assert not [row for row in rows.values() if "ending" in row], "a part ended with an error after its first depth"
    left_out = {name: row["reason"] for name, row in rows.items() if row["status"] == "skipped"}
    assert set(left_out.values()) == {"products in 8 bits are for GPUs"}
    failed = {name: row for name, row in rows.items() if row["status"] not in ("measured", "passed", "ready")}
    assert failed.keys() == left_out.keys(), {name: row for name, row in failed.items() if name not in left_out}


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
