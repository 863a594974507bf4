"""What the hub of the tests holds: repositories with commits, and the files of a typical model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from safetensors.numpy import save

LARGE_FILE_BYTES = 10_000
"""From this size on a file is "LFS": it has a sha256 and is served by the CDN."""


@dataclass
class Repository:
    """A repository's branches and tags, and the files of each commit."""

    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False
    listed_sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that the hub lists instead of the true ones."""

    def commit(self, files: dict[str, bytes], *, branch: str = "main") -> str:
        """Add a commit to a branch; returns its id."""
        commit = hashlib.sha1(repr((sorted(files.items()), branch)).encode()).hexdigest()
        self.commits[commit] = files
        self.refs[branch] = commit
        return commit

    def files_at(self, revision: str) -> dict[str, bytes] | None:
        return self.commits.get(self.refs.get(revision, revision))


def model_files(num_values: int = 100_000) -> dict[str, bytes]:
    """A model repository as people publish them: weights in several formats, code, and files for other tools."""
    weights = {"weight": np.arange(num_values, dtype=np.float32)}
    return {
        "README.md": b"# A model",
        "config.json": b'{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}',
        "tokenizer.json": b"{}",
        "model.safetensors": save(weights),
        "pytorch_model.bin": b"pickle" * 5000,
        "modeling_own.py": b"print('never run')",
        "original/consolidated.00.pth": b"pickle",
        "onnx/model.safetensors": save(weights),
        "model.gguf": b"gguf",
    }
