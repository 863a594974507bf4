"""Checkpoints of a training run on disk: writing, completing, finding the latest whole one, and removing old ones.

    checkpoints/step-120/           a complete checkpoint: the engine's files and `manifest.json` (file → bytes)
    checkpoints/partial-step-150/   being written, or cut off

A checkpoint is written under its partial name, gets its manifest, and is renamed last, so a killed run leaves nothing
that looks complete; a checkpoint whose files were truncated later (a full disk, a crashed machine) is recognised by its
manifest. The engine decides what is in the files. Besides weights and optimizer state a run needs only the step, since
data order, learning rate and random numbers are functions of it.
"""

import json
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from stages.core.contract import is_main_process
from stages.core.errors import ResourceError
from stages.core.files import write_atomically
from stages.engines.engine import Engine

MANIFEST = "manifest.json"
GIB = 2**30


@dataclass(frozen=True)
class _Write:
    step: int
    done: Future[None]


class Checkpoints:
    """Checkpoints of one training run, written one at a time; only process rank 0 renames and removes them."""

    def __init__(self, folder: Path, engine: Engine, kept: int) -> None:
        self._folder = folder
        self._engine = engine
        self._kept = kept
        self._writing: _Write | None = None
        self._last_saved = 0
        self.best_step = 0
        """Step with the lowest held-out loss so far, whose checkpoint is kept until the end; 0 if there is none."""
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int) -> None:
        """Start writing a step's checkpoint after the previous one is complete; raise ResourceError for a full disk."""
        self.wait()
        partial = self._partial(step)
        if is_main_process():
            shutil.rmtree(partial, ignore_errors=True)
            check_free_disk(self._folder, self._engine.checkpoint_bytes, f"checkpoint of step {step}")
        # From here on the engine writes in the background; `wait` or `poll` completes the checkpoint.
        self._writing = _Write(step, self._engine.save(partial))
        self._last_saved = step

    def save_best(self, step: int) -> None:
        """Keep a checkpoint of the step just done until the run ends, as the best so far."""
        self.best_step = step
        if self._last_saved != step:
            self.save(step)

    def poll(self) -> None:
        """Complete the checkpoint being written if all its files are there; cheap enough to call at every step."""
        if self._writing and self._writing.done.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete; raise the error if its writing failed."""
        if self._writing is None:
            return
        # first, so that a failed writing is reported once, and not by the next `save` again
        writing, self._writing = self._writing, None
        writing.done.result()
        if is_main_process():
            complete_checkpoint(self._partial(writing.step), self._folder / f"step-{writing.step}")
            # after the rename: until a newer checkpoint is whole, the old ones stay
            for step, folder in complete_checkpoints(self._folder)[self._kept :]:
                if step != self.best_step:
                    shutil.rmtree(folder)

    def load_latest(self) -> int:
        """Load the latest whole checkpoint and return its training step, or 0 when there is none."""
        # Rank 0 looks, and all load the same step.
        found = complete_checkpoints(self._folder) if is_main_process() else []
        step = int(self._engine.broadcast_from_rank0(found[0][0] if found else 0))
        if step:
            self.load(step)
        return step

    def load(self, step: int) -> None:
        """Load the whole checkpoint of a training step; every process must pass the same step."""
        self._engine.load(self._folder / f"step-{step}")

    def _partial(self, step: int) -> Path:
        return self._folder / f"partial-step-{step}"


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return training step and folder of every whole checkpoint, the latest first."""
    found = ((int(path.name.removeprefix("step-")), path) for path in folder.glob("step-*"))
    return sorted((entry for entry in found if _is_whole(entry[1])), reverse=True)


def complete_checkpoint(partial: Path, final: Path) -> None:
    """Complete a checkpoint: write the sizes of its files to its manifest, and rename its folder to `final`."""
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
    write_atomically(partial / MANIFEST, json.dumps(sizes))
    # of an earlier attempt, cut off by a full disk or a crash: it was not whole, or training would have begun after it
    shutil.rmtree(final, ignore_errors=True)
    partial.replace(final)


def check_free_disk(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Raise ResourceError unless `needed_bytes` are free on the file system of `folder`."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise ResourceError(
            f"writing the {purpose} to {folder}: {free_bytes / GIB:.2f} GiB are free, {needed_bytes / GIB:.2f} GiB are "
            "needed; free some space, or lower execution.checkpoints_kept. Training continues from the last checkpoint"
        )


def _is_whole(folder: Path) -> bool:
    """Return whether a checkpoint's folder has all files of its manifest in full size, none a symbolic link."""
    manifest = folder / MANIFEST
    if folder.is_symlink() or not manifest.is_file():
        return False
    sizes = json.loads(manifest.read_text(encoding="utf-8"))
    return all(
        (path := folder / name).is_file() and not path.is_symlink() and path.stat().st_size == size
        for name, size in sizes.items()
    )
