"""Comparison of two champions, refreshes or artifacts, which states their differences as sentences."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flows.ledger.record import RefreshRecord
from flows.planning.changes import CONTENT, REVISION, artifact_changes, kept_changes
from flows.recipe.version import Difference, differences
from flows.report.lineage import LineageSubject, scores_of
from flows.store.record import Artifact, Index
from stages.core.fields import StrictModel

UPSTREAM = "version of "
COMMIT_CHARACTERS = 12


@dataclass(frozen=True)
class ComparedSide:
    """Artifacts and evaluation scores of one of the two models, artifacts or refreshes that are compared.

    root: of a compared artifact; None for a refresh. unbuilt: stages without an artifact → their states.
    """

    name: str
    artifacts: tuple[Artifact, ...]
    scores: dict[str, float]
    root: Artifact | None = None
    unbuilt: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


class Differences(StrictModel):
    """Differences from an old model, artifact or refresh to a new one, as sentences grouped by subject.

    rebuilt: stages that were built again only because what they were built from differs.
    """

    old: str
    new: str
    data: tuple[str, ...]
    config: tuple[str, ...]
    code: tuple[str, ...]
    stages: tuple[str, ...]
    scores: tuple[str, ...]
    rebuilt: tuple[str, ...]
    same: tuple[str, ...]

    @property
    def none(self) -> bool:
        """Return whether the two compared models, artifacts or refreshes do not differ at all."""
        return not (self.data or self.config or self.code or self.stages or self.scores or self.rebuilt)

    def by_heading(self) -> dict[str, tuple[str, ...]]:
        """Return the sentences about all differences, by heading: data, config, code, stages, scores, rebuilt."""
        return {name: getattr(self, name) for name in ("data", "config", "code", "stages", "scores", "rebuilt")}


def side_of_subject(subject: LineageSubject, index: Index) -> ComparedSide:
    """Return an artifact, everything that it was made from, and its evaluations as one side of a comparison."""
    found = {one.folder: one for root in (subject.root, *subject.evaluations) for one in index.closure(root)}
    name = f"{subject.name} ({subject.registered + ', ' if subject.registered else ''}{subject.root.folder.name})"
    return ComparedSide(name, tuple(found.values()), scores_of(subject.evaluations), subject.root)


def side_of_refresh(record: RefreshRecord, index: Index) -> ComparedSide:
    """Return the artifacts, scores and unbuilt stages of a refresh, to compare it with another refresh or a model."""
    found = {name: index.find(entry.kind, entry.version) for name, entry in record.stages.items()}
    artifacts = tuple(one for name, one in found.items() if one and record.stages[name].artifact)
    unbuilt = {name: entry.state for name, entry in record.stages.items() if not entry.artifact}
    evaluations = [one for one in artifacts if one.record.product == "scores"]
    return ComparedSide(record.refresh, artifacts, scores_of(evaluations), None, unbuilt, record.overrides)


def compare(old: ComparedSide, new: ComparedSide, kept: Path) -> Differences:
    """Compare two models, artifacts or refreshes, and return their differences.

    kept: folder of the contents of files outside the store, by their hash (`flows/planning/changes.py`).
    """
    pairs, gone, come = _paired(old, new)
    changed = [pair for pair in pairs if not _is_same(*pair)]
    lines: dict[str, list[str]] = defaultdict(list)
    for pair in changed:
        _compare_pair(*pair, kept, lines)
    lines["code"] += _commits(changed)
    lines["code"] += _packages(changed)
    if old.overrides != new.overrides:
        lines["config"].append(f"overrides {' '.join(old.overrides) or 'none'} → {' '.join(new.overrides) or 'none'}")
    lines["stages"] += [f"{artifact.folder.name} ({artifact.record.kind}) is gone" for artifact in gone]
    lines["stages"] += [f"{artifact.folder.name} ({artifact.record.kind}) is new" for artifact in come]
    for side in (old, new):
        lines["stages"] += [
            f"{name} was not built in {side.name}: {state}" for name, state in (side.unbuilt or {}).items()
        ]
    return Differences(
        old=old.name,
        new=new.name,
        data=tuple(lines["data"]),
        config=tuple(lines["config"]),
        code=tuple(lines["code"]),
        stages=tuple(lines["stages"]),
        scores=tuple(_scores(old.scores, new.scores)),
        rebuilt=tuple(lines["rebuilt"]),
        same=tuple(artifact.folder.name for pair in pairs if _is_same(*pair) for artifact in pair[1:]),
    )


def _paired(
    old: ComparedSide, new: ComparedSide
) -> tuple[list[tuple[Artifact, Artifact]], list[Artifact], list[Artifact]]:
    """Pair artifacts of old and new: roots, same version, same stage name, or sole ones of a kind.

    Return the pairs, the artifacts only of the old one, and the artifacts only of the new one.
    """
    before, after = [*old.artifacts], [*new.artifacts]
    pairs: list[tuple[Artifact, Artifact]] = []

    def pair(former: Artifact, present: Artifact) -> None:
        pairs.append((former, present))
        before.remove(former)
        after.remove(present)

    if old.root and new.root and old.root.record.kind == new.root.record.kind:
        pair(old.root, new.root)
    for matches in (_same_version, _same_stage):
        # A copy, since `pair` removes from the list.
        for artifact in [*before]:
            if match := next((other for other in after if matches(artifact, other)), None):
                pair(artifact, match)
    for kind in {one.record.kind for one in before}:
        olds, news = ([one for one in side if one.record.kind == kind] for side in (before, after))
        if len(olds) == len(news) == 1:
            pair(olds[0], news[0])
    return pairs, before, after


def _same_version(one: Artifact, other: Artifact) -> bool:
    return (one.record.kind, one.record.version) == (other.record.kind, other.record.version)


def _same_stage(one: Artifact, other: Artifact) -> bool:
    return (one.record.kind, one.record.stage) == (other.record.kind, other.record.stage)


def _is_same(old: Artifact, new: Artifact) -> bool:
    return _same_version(old, new) and old.record.digest == new.record.digest


def _compare_pair(old: Artifact, new: Artifact, kept: Path, lines: dict[str, list[str]]) -> None:
    name = new.record.stage if _same_stage(old, new) else f"{old.record.stage} → {new.record.stage}"
    own = [
        item for item in differences(old.record.identity, new.record.identity) if not item.field.startswith(UPSTREAM)
    ]
    is_fetched = "source" in new.record.tags or not new.record.upstream
    if is_fetched or new.record.product == "dataset":
        lines["data"] += [f"{name}: {change}" for change in _content(old, new, own)]
    elif not own:
        lines["rebuilt"].append(name)
    for item in own:
        if item.field == "stage_version":
            lines["code"].append(f"{name}: how its kind computes ({new.record.kind} {item.old} → {item.new})")
        elif item.field.startswith(CONTENT) and item.field != REVISION:
            change = kept_changes(kept, item) or "has changed"
            lines["config"].append(f"{name}: {item.field.removeprefix(CONTENT)} {change}")
        elif item.field != REVISION:
            lines["config"].append(f"{name}: {item}")


def _content(old: Artifact, new: Artifact, own: Sequence[Difference]) -> Iterator[str]:
    """Yield sentences about how a dataset or a download changed: its source, its revision, and which files."""
    sources = [one.record.tags.get("source") for one in (old, new)]
    revision = next((one for one in own if one.field == REVISION), None)
    if sources[0] != sources[1]:
        yield f"from {sources[0] or 'elsewhere'} → {sources[1] or 'elsewhere'}"
    elif revision and "has changed" not in str(revision):  # a file's revision is a hash, which means nothing to people
        yield f"revision {revision.old} → {revision.new}"
    yield from artifact_changes(old, new)


def _commits(changed: Sequence[tuple[Artifact, Artifact]]) -> Iterator[str]:
    """Yield sentences about stages that different Git commits of this program built, one for each pair of commits."""
    stages: dict[tuple[str, str], list[str]] = defaultdict(list)
    for old, new in changed:
        stages[_commit(old.record.git_commit), _commit(new.record.git_commit)].append(new.record.stage)
    for (before, after), names in stages.items():
        if before != after:
            yield f"commit {before} → {after} ({', '.join(names)})"


def _commit(commit: str | None) -> str:
    return "unknown" if commit is None else commit[:COMMIT_CHARACTERS] + ("-dirty" if commit.endswith("-dirty") else "")


def _packages(changed: Sequence[tuple[Artifact, Artifact]]) -> Iterator[str]:
    """Yield a sentence for each Python package whose version differs between builds of a stage, once per package."""
    packages: dict[str, tuple[str | None, str | None]] = {}
    for old, new in changed:
        before, after = old.record.packages, new.record.packages
        packages |= {name: (before.get(name), after.get(name)) for name in before.keys() | after.keys()}
    for name, (former, present) in sorted(packages.items()):
        if former != present:
            yield f"{name} {former or 'none'} → {present or 'none'}"


def _scores(old: dict[str, float], new: dict[str, float]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        before, after = (f"{side[name]:.4g}" if name in side else "none" for side in (old, new))
        if old.get(name) != new.get(name):
            yield f"{name} {before} → {after}"
