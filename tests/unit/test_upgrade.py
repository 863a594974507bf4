"""`make upgrade` on a tiny index: what resolves, what the resolver says of the rest, and what broke by family."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.upgrade import (
    ENVIRONMENTS,
    REQUIREMENTS,
    Environment,
    by_family,
    described,
    failures,
    install,
    resolve_all,
    write_bounds,
)

WHEELS = {
    ("app", "1.0"): "lib",
    ("app", "2.0"): "lib<2",
    ("app", "2.1a1"): "lib",
    ("lib", "1.0"): None,
    ("lib", "1.1"): None,
    ("lib", "2.0"): None,
    ("alone", "1.0"): None,
    ("built", "1.0"): None,
    ("built", "2.0"): None,
}
"""Releases of the tiny index, each with a requirement."""
TESTS = """
import pytest

@pytest.mark.parametrize("column", ["packed", "exported = trained"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_family(family, column):
    assert (family, column) != ("qwen3_5", "packed"), "a leak of 0.1 nats"

def test_another():
    raise ValueError("no such layer")
"""


def write_wheel(folder: Path, name: str, version: str, requirement: str | None) -> None:
    info, needed = f"{name}-{version}.dist-info", f"Requires-Dist: {requirement}\n" if requirement else ""
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))


@pytest.fixture
def requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a requirements folder of an environment with a registry, and a folder with one build for this machine."""
    registry, builds, folder = tmp_path / "registry", tmp_path / "builds", tmp_path / "requirements"
    for (name, version), requirement in WHEELS.items():
        (registry / name).mkdir(parents=True, exist_ok=True)
        write_wheel(registry / name, name, version, requirement)
    for package in registry.iterdir():
        links = "".join(f'<a href="{wheel.name}">{wheel.name}</a>' for wheel in package.iterdir())
        (package / "index.html").write_text(links)
    builds.mkdir()
    write_wheel(builds, "built", "1.0+cpu", None)
    monkeypatch.setenv("UV_DEFAULT_INDEX", registry.as_uri())
    monkeypatch.setenv("UV_FIND_LINKS", str(builds))
    folder.mkdir()
    own = "# The bound of lib matters.\napp==1.0\nlib<1.1  # breaks on 1.1\nalone\nbuilt==1.0\n"
    (folder / "pipeline.in").write_text(own)
    pins = "alone==1.0\napp==1.0 \\\n    --hash=sha256:0\nbuilt==1.0\nlib==1.0\n    # via app\n"
    (folder / "pipeline.txt").write_text(pins)
    return folder


def test_the_newest_together_is_found_installed_and_written_and_the_rest_is_explained(
    requirements: Path, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    (found,) = resolve_all(requirements, scratch, [Environment("pipeline")])
    assert found.pinned == {"app": "1.0", "lib": "1.0", "alone": "1.0", "built": "1.0"}
    # Neither the alpha of app nor app 1.0 with lib 2.0.
    assert found.together == {"app": "2.0", "lib": "1.1", "alone": "1.0", "built": "1.0"}
    assert found.newest == {"app": "2.0", "lib": "2.0", "alone": "1.0", "built": "2.0"}
    assert "app==2.0 depends on lib<2" in found.held["lib"]
    assert found.held["built"] == "built==1.0 stands, since its builds come from a folder of wheels"
    assert set(found.held) == {"lib", "built"}
    assert (requirements / "pipeline.in").read_text().startswith("# The bound of lib matters.\napp==1.0\n")

    python = install(scratch, [found])
    program = "import app, built, lib; print(app.VERSION, built.VERSION, lib.VERSION)"
    assert subprocess.check_output([python, "-c", program], text=True) == "2.0 1.0+cpu 1.1\n"

    report = described([found], {"zoo": []})
    assert "- app: 1.0 → 2.0\n- lib: 1.0 → 1.1\n" in report
    assert "- lib stays at 1.1; 2.0 exists: Because app==2.0 depends" in report
    assert "Already the newest: alone 1.0.\n\n## zoo\n\nEverything passed.\n" in report

    write_bounds(requirements / "pipeline.in", found.together)
    written = (requirements / "pipeline.in").read_text()
    assert written == "# The bound of lib matters.\napp==2.0\nlib>=1.1,<1.2 # breaks on 1.1\nalone\nbuilt==1.0\n"


def test_without_what_holds_it_back_a_package_is_the_newest(requirements: Path, tmp_path: Path) -> None:
    (found,) = resolve_all(requirements, tmp_path / "scratch", [Environment("pipeline")], without=["App"])
    assert found.together == {"lib": "2.0", "alone": "1.0", "built": "1.0"}


def test_an_environment_that_does_not_resolve_says_why(requirements: Path, tmp_path: Path) -> None:
    (requirements / "pipeline.in").write_text("app\nlib\n")
    (requirements / "pipeline.txt").write_text("app==2.0\nlib==2.0\n")
    (found,) = resolve_all(requirements, tmp_path / "scratch", [Environment("pipeline")])
    assert found.problem
    assert "app==2.0 depends on lib<2" in found.problem
    assert "Nothing resolves: Because" in described([found])


def test_requirements_that_others_include_are_resolved_and_installed_too() -> None:
    """Tests of videos failed in the scratch environment, which lacked PyAV."""
    over = {one.name: one.over for one in ENVIRONMENTS}
    for name in over:
        lines = (REQUIREMENTS / f"{name}.in").read_text().splitlines()
        assert {Path(line[3:]).stem for line in lines if line.startswith(("-r ", "-c "))} <= {*over[name]}, name


def test_what_broke_is_listed_by_family(tmp_path: Path) -> None:
    (tmp_path / "test_zoo.py").write_text(TESTS)
    results = tmp_path / "zoo.xml"
    assert failures(results) == ["zoo: pytest wrote no results"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", "test_zoo.py"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    broken = by_family(failures(results))
    assert broken["qwen3_5"] == ["packed: AssertionError: a leak of 0.1 nats"]
    assert broken["other tests"] == ["test_zoo::test_another: ValueError: no such layer"]
    assert set(broken) == {"qwen3_5", "other tests"}
