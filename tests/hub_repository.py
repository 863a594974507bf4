"""Repositories of the stand-in for a model hub: branches, commits, and the files of a typical model."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
from safetensors.numpy import save

LARGE_FILE_BYTES = 10_000
"""Size in bytes from which the stand-in hub stores a file in LFS: listed with its sha256, and served by the CDN."""


@dataclass
class Repository:
    """Repository of the stand-in for a model hub: its branches and tags, and the files of each commit."""

    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False
    private: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files uploaded to the stand-in hub, by sha256, whether a commit refers to them or not."""
    listed_sizes: dict[str, int] = field(default_factory=dict)
    """Wrong file sizes, by path, that the stand-in hub lists instead of the true ones."""

    def commit(self, files: dict[str, bytes], *, branch: str = "main") -> str:
        """Add a commit to a branch of the stand-in hub's repository, and return the commit's id."""
        commit = hashlib.sha1(repr((sorted(files.items()), branch)).encode()).hexdigest()
        self.commits[commit] = files
        self.refs[branch] = commit
        return commit

    def commit_at(self, revision: str) -> str:
        """Return the commit that a branch or tag points to; a commit id is returned as it is."""
        return self.refs.get(revision, revision)

    def files_at(self, revision: str) -> dict[str, bytes] | None:
        return self.commits.get(self.commit_at(revision))

    def sibling(self, file: str, content: bytes) -> dict[str, object]:
        """Return a file's entry in the list `siblings` of a repository, as the Hugging Face hub writes it."""
        entry = self.tree_entry(file, content)
        return {
            "rfilename": file,
            "blobId": entry["oid"],
            **{key: entry[key] for key in ("size", "lfs") if key in entry},
        }

    def tree_entry(self, file: str, content: bytes) -> dict[str, object]:
        """Return a file's entry in a folder listing of the Hugging Face hub."""
        size = self.listed_sizes.get(file, len(content))
        entry: dict[str, object] = {"type": "file", "path": file, "size": size, "oid": blob_id(content)}
        if len(content) >= LARGE_FILE_BYTES:
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "sha256": digest, "size": size, "pointerSize": 130}
        return entry

    def tree(self, revision: str, folder: str = "", recursive: bool = False) -> list[dict[str, object]]:
        """Return a folder's files and folders, or with `recursive` all files below, at a revision, as the hub does."""
        files = self.files_at(revision) or {}
        prefix = f"{folder}/" if folder else ""
        inside = {name: content for name, content in files.items() if name.startswith(prefix)}
        here = [self.tree_entry(n, c) for n, c in inside.items() if recursive or "/" not in n.removeprefix(prefix)]
        below = {n.removeprefix(prefix).partition("/")[0] for n in inside if "/" in n.removeprefix(prefix)}
        return here + [
            {"type": "directory", "path": prefix + name, "oid": "0" * 40, "size": 0} for name in sorted(below)
        ]

    def paths_info(self, revision: str, paths: list[str]) -> list[dict[str, object]]:
        """Return the hub API's entries of the given paths at a revision; paths that do not exist are left out."""
        files = self.files_at(revision) or {}
        found = [self.tree_entry(path, files[path]) for path in paths if path in files]
        folders = [path for path in paths if any(name.startswith(f"{path}/") for name in files)]
        return found + [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]


def blob_id(content: bytes) -> str:
    """Return the object id that git gives to a file with this content."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def model_files(num_values: int = 100_000) -> dict[str, bytes]:
    """Return the files of a typical model repository: weights in several formats, code, and files for other tools."""
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
