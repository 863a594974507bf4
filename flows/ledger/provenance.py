"""Provenance of artifacts: the versions of installed Python packages, and the Git commit of this program."""

import functools
import importlib.metadata
import subprocess
from pathlib import Path

PACKAGES = (
    "llm-lifecycle",
    "torch",
    "transformers",
    "datasets",
    "huggingface_hub",
    "modelscope",
    "llmcompressor",
    "compressed-tensors",
    "lm_eval",
    "megatron-core",
)


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the version of each installed Python package, by name."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def git_commit() -> str | None:
    """Return the Git commit of this code, with `-dirty` for uncommitted changes; None outside a Git checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
