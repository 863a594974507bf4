"""Table of a stage's episodes as Parquet, one a row: its prompt, transcript, rewards, metrics, and segments of tokens.

Stages that generate and evaluate write one file (of several tasks, each its own); training writes one for each round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stages.core.fields import StrictModel

if TYPE_CHECKING:
    import pyarrow

EPISODES_FILE = "episodes.parquet"
EPISODES_FOLDER = "episodes"
"""Folder of training's files, each named after the first optimizer step that learned from its round."""
REWARD = "reward_"
"""Beginning of the names of columns with rewards; metrics of episodes have no such name."""
UNREAD = frozenset({"prompt_ids", "segments"})
"""Columns that are not read to show episodes: most of the bytes."""


class StoredSegment(StrictModel):
    """Segment of an episode, as stored. log_probabilities: of the model's tokens, in nats."""

    author: Literal["model", "environment"]
    token_ids: list[int]
    log_probabilities: list[float]


@dataclass(frozen=True)
class EpisodeRow:
    """Episode as a row of the table, in which each reward and each metric has a column.

    row: place of its prompt in the dataset. prompt, prompt_ids: with what the environment showed first. reference: the
    right answer. step: optimizer step that first learned from it; None outside of training. sample: its number among
    the prompt's episodes. text: what rewards saw. num_tokens: sampled ones. total: weighted sum of the rewards.
    environment: name of that of several in which it was played, which other rewards and metrics may have; else None.
    """

    row: str
    prompt: str
    reference: str | None
    step: int | None
    sample: int
    seed: int | None
    text: str
    transcript: str
    end: str
    num_tokens: int
    total: float
    prompt_ids: Sequence[int]
    segments: Sequence[StoredSegment]
    rewards: Mapping[str, float]
    metrics: Mapping[str, float]
    environment: str | None = None

    @property
    def columns(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("rewards", "metrics")}
        rewards = {f"{REWARD}{name}": value for name, value in self.rewards.items()}
        return {**own, **rewards, **self.metrics, "segments": [segment.model_dump() for segment in self.segments]}


def write_episodes(path: Path, episodes: Sequence[EpisodeRow]) -> None:
    """Write episodes, at least one, as a Parquet file; rewards and metrics that one does not have are null."""
    import pyarrow  # 50 ms, which checks of recipes do without
    from pyarrow import parquet

    rows = [episode.columns for episode in episodes]
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.Table.from_pylist(rows, schema=_schema(names))
    parquet.write_table(table, path, compression="zstd")


def _schema(names: Sequence[str]) -> pyarrow.Schema:
    """Return the columns' types; a reward's and a metric's is a number. Servers give log-probabilities in fp32."""
    import pyarrow as arrow

    segment = {
        "author": arrow.string(),
        "token_ids": arrow.list_(arrow.int32()),
        "log_probabilities": arrow.list_(arrow.float32()),
    }
    types = {
        **dict.fromkeys(("row", "prompt", "reference", "text", "transcript", "end", "environment"), arrow.string()),
        **dict.fromkeys(("step", "sample", "num_tokens"), arrow.int64()),
        "seed": arrow.uint64(),
        "prompt_ids": arrow.list_(arrow.int32()),
        "segments": arrow.list_(arrow.struct(list(segment.items()))),
    }
    return arrow.schema([(name, types.get(name, arrow.float64())) for name in names])


def round_file(folder: Path, first_step: int) -> Path:
    """Return the path of the episodes from which training first learned in this optimizer step."""
    return folder / EPISODES_FOLDER / f"step-{first_step}.parquet"


def round_files(folder: Path) -> dict[int, Path]:
    """Return the files of a training's episodes by the first step that learned from them, in their order."""
    found = {int(path.stem.removeprefix("step-")): path for path in (folder / EPISODES_FOLDER).glob("step-*.parquet")}
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class ShownEpisode:
    """Episode for people to read. place: of its prompt in the dataset. rewards: by name, with their sum as `total`."""

    file: Path
    place: str
    sample: int
    step: int | None
    prompt: str
    transcript: str
    reference: str | None
    rewards: dict[str, float]


def shown_episodes(artifact: Path, most: int) -> Iterator[ShownEpisode]:
    """Yield the first episodes of each of an artifact's files; of a training, those of its first and last rounds."""
    rounds = list(round_files(artifact).values())
    for file in [*sorted(artifact.glob(f"*{EPISODES_FILE}")), *rounds[:1], *rounds[1:][-1:]]:
        from pyarrow.parquet import ParquetFile  # not for artifacts without episodes

        with ParquetFile(file) as table:
            columns = [name for name in table.schema_arrow.names if name not in UNREAD]
            rows = next(table.iter_batches(most, columns=columns)).to_pylist()
        for row in rows:
            rewards = {
                name.removeprefix(REWARD): value
                for name, value in row.items()
                if name.startswith(REWARD) and value is not None
            }
            environment = row.get("environment")  # files of earlier versions have none
            yield ShownEpisode(
                file,
                f"{row['row']} in {environment}" if environment else row["row"],
                row["sample"],
                row.get("step"),  # files of earlier versions have none
                row["prompt"],
                row["transcript"],
                row["reference"],
                {**rewards, "total": row["total"]},
            )
