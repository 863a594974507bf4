"""vLLM's program is found in its environment; if it is missing, the error says how to install it."""

from pathlib import Path

import pytest

from stages.core.errors import ResourceError
from stages.kinds.serve.config import ServeConfig
from stages.serving.vllm.engine import find_vllm


def make_environment(root: Path, version: str | None) -> Path:
    """Make a fake virtual environment with the files that the lookup of vLLM reads; returns its `vllm`."""
    site_packages = root / "lib" / "python3.11" / "site-packages"
    site_packages.mkdir(parents=True)
    (root / "bin").mkdir()
    for name in ("vllm", "python"):
        (root / "bin" / name).touch(mode=0o755)
    if version:
        metadata = site_packages / f"vllm-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return root / "bin" / "vllm"


@pytest.mark.parametrize(("version", "on_cpu"), [("0.32.0+cpu", True), ("0.32.0", False)])
def test_the_build_is_told_by_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, on_cpu: bool
) -> None:
    monkeypatch.setenv("LIFECYCLE_VLLM", str(make_environment(tmp_path, version)))

    program = find_vllm()

    assert (program.version, program.runs_on_cpu) == (version, on_cpu)
    assert program.python == tmp_path / "bin" / "python"


def test_another_vllm_is_another_version_of_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServeConfig.model_validate({"kind": "serve", "model": "sft"})
    resolved = []
    for version in ("0.32.0", "0.33.0"):
        monkeypatch.setenv("LIFECYCLE_VLLM", str(make_environment(tmp_path / version, version)))
        resolved.append(config.resolve_outside())

    assert resolved == [{"vllm_version": "0.32.0"}, {"vllm_version": "0.33.0"}]


def test_a_program_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIFECYCLE_VLLM", str(tmp_path / "vllm"))

    with pytest.raises(ResourceError, match=r"LIFECYCLE_VLLM names .*/vllm, which is no program"):
        find_vllm()


def test_without_vllm_anywhere_the_way_to_get_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIFECYCLE_VLLM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))

    with pytest.raises(ResourceError, match="make environments"):
        find_vllm()


def test_an_environment_without_metadata_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIFECYCLE_VLLM", str(make_environment(tmp_path, None)))

    with pytest.raises(ResourceError, match="package metadata"):
        find_vllm()
