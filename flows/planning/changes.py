"""Descriptions of what changed in the files that a recipe names, such as `train.jsonl 300 → 350 rows`, for the plan.

Files that are copied into artifacts are compared there. Of a `task_folder` or a `chat_template` the identity has only a
hash, so a cache of the store keeps what they held by their hash: lines of tasks and templates, without what may be a
key; of code, into which people write keys, only the hash.
"""

import csv
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

from pydantic import TypeAdapter

from flows.planning.plan import Plan, PlannedStage
from flows.recipe.version import Difference
from flows.store.content import CONTENT_FOLDERS, outside_files
from flows.store.record import Artifact, Index
from stages.core.cache import note_use
from stages.core.errors import LifecycleError
from stages.core.fields import StrictModel
from stages.core.files import write_atomically
from stages.core.hashing import sha256_of_files
from stages.core.redaction import REPLACEMENT, is_secret_name, redact, shortened
from stages.hubs.fetched import FetchedConfig
from stages.hubs.files import requested_hashes
from stages.hubs.registry import HUBS

ROW_FILES = (".jsonl", ".ndjson", ".csv")
"""File suffixes for which a change is described by the number of rows."""
TEXT_FILES = (".yaml", ".yml", ".jinja", ".jinja2", ".j2", ".json", ".txt", ".md")
"""Suffixes of text files whose lines a plan records, so that a later plan can show which line changed."""
MAX_COUNTED_BYTES = 1 << 28
"""Largest file in bytes whose rows are counted, which takes about a second; a larger file is described by its bytes."""
MAX_KEPT_BYTES = 1 << 16
"""Largest text file in bytes whose lines are recorded and compared."""
MAX_COMPARED_LINES = 500
LONGEST_LINE = 60
_WORD = re.compile(r"[\w-]+")
_LIKE_A_KEY = re.compile(r"(?=[\w+/=-]*[0-9])(?=[\w+/=-]*[A-Za-z])[\w+/=-]{20,}")
"""Pattern of text that may be an API key: 20 characters or more, with letters and digits. It is recorded as `***`."""
REVISION = "content of revision"
CONTENT = "content of "
CONTENTS_CACHE = "contents"
"""Name of the cache in which plans record contents of a recipe's files, so that later plans can describe changes."""
MAX_NAMED = 5


@dataclass(frozen=True)
class HashedFiles:
    """Hashes of a folder's files, of which there may be 100,000. root: text before their names."""

    root: str
    sha256: Mapping[str, str]

    def amount(self, name: str) -> str:
        return amount_of(Path(self.root + name))


class Content(StrictModel):
    """Recorded content of a file at one time: its hash, its number of rows or bytes, and the lines of a short text.

    amount: rows or bytes, in words. text: lines without keys; None of files of rows, which are only counted, and of
    code.
    """

    sha256: str
    amount: str
    text: str | None


Contents = dict[str, Content]
"""Recorded contents of one file, or of all files of a folder, by file name."""
CONTENTS = TypeAdapter(Contents)


def keep_contents(folder: Path, digest: str, path: Path) -> None:
    """Record contents under their `digest` in a cache folder, if writable, for later plans to describe changes."""
    before = kept_contents(folder, digest)
    with suppress(OSError):
        if before is None:
            now = contents_of(path)
        else:  # earlier versions of this program kept keys too
            now = {
                name: content.model_copy(update={"text": _kept(name, content.text)}) for name, content in before.items()
            }
        if now != before:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / f"{digest}.json", CONTENTS.dump_json(now).decode())


def kept_contents(folder: Path, digest: str) -> Contents | None:
    """Return the file contents that an earlier plan recorded under a hash; None for a missing or damaged record."""
    note = folder / f"{digest}.json"
    try:
        contents = CONTENTS.validate_json(note.read_bytes())
    except (OSError, ValueError):
        return None
    note_use(note)
    return contents


def contents_of(path: Path) -> Contents:
    """Return hash, size and text of a file, or of a folder's files except logs and bookkeeping. Raises OSError."""
    files = outside_files(path)
    hashes = sha256_of_files(files)
    return {
        name: Content(sha256=hashes[name], amount=amount_of(file), text=_text(file)) for name, file in files.items()
    }


def content_changes(before: Contents, after: Contents) -> Iterator[str]:
    """Yield each file's change between two plans, such as `t.yaml line 3: 'a: 1' → 'a: 2'`."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if new is None:
            yield f"{name} is gone"
        elif old is None:
            yield f"{name} is new ({new.amount})"
        elif old.sha256 != new.sha256:
            lines = None if old.text is None or new.text is None else _changed_lines(old.text, new.text)
            yield f"{name} {lines or changed_amount(old.amount, new.amount)}"


def changed_amount(old: str, new: str) -> str:
    """Describe how a file's size changed, as `300 → 350 rows`, or as `other rows, 300 rows` if the size is the same."""
    number, _, unit = old.partition(" ")
    return f"{number} → {new}" if old != new and new.endswith(unit) else f"other {unit}, {new}"


def amount_of(file: Path) -> str:
    """Return a file's size as text: `350 rows`, or `1,234 bytes` if it has no rows. Raises OSError."""
    num_rows = rows_of(file)
    return f"{file.stat().st_size:,} bytes" if num_rows is None else f"{num_rows:,} rows"


def rows_of(file: Path) -> int | None:
    """Return the rows of a data file; None for other files, and ones too large to count. Raises OSError."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        with suppress(ValueError):  # damaged: the reader of its rows reports it
            # Reads the footer only, however large the file is.
            return int(pyarrow.parquet.read_metadata(file).num_rows)
        return None
    if file.suffix not in ROW_FILES or file.stat().st_size > MAX_COUNTED_BYTES:
        return None
    if file.suffix == ".csv":
        # The default, 128 KiB a field, is less than a long document.
        csv.field_size_limit(sys.maxsize)
        with file.open(encoding="utf-8", errors="replace", newline="") as text:
            # Without the heading and empty lines; a field in quotes may hold line breaks.
            return max(0, sum(map(bool, csv.reader(text))) - 1)
    with file.open("rb") as stream:
        return sum(bool(line.strip()) for line in stream)


def _text(file: Path) -> str | None:
    if file.suffix not in TEXT_FILES or file.stat().st_size > MAX_KEPT_BYTES:
        return None
    with suppress(UnicodeDecodeError):
        return _kept(file.name, file.read_bytes().decode())
    return None


def _kept(name: str, text: str | None) -> str | None:
    """Return a text file's content for recording, with `***` in place of possible API keys; None for other files."""
    if text is None or not name.endswith(TEXT_FILES):
        return None
    return _LIKE_A_KEY.sub(REPLACEMENT, redact("".join(_without_named_secrets(text))))


def _without_named_secrets(text: str) -> Iterator[str]:
    """Yield a text's lines, with `***` for each that names a key or password and for those nested below it."""
    hidden_below = None
    for line in text.splitlines(keepends=True):
        content = line.lstrip()
        indent = len(line) - len(content)
        if hidden_below is not None and content and indent <= hidden_below:
            hidden_below = None
        if hidden_below is None and any(map(is_secret_name, _WORD.findall(line))):
            hidden_below = indent
        yield f"{REPLACEMENT}\n" if content and hidden_below is not None else line


def _changed_lines(old: str, new: str) -> str | None:
    """Describe the first changed line of a text and how many more changed; None if lines do not show the change."""
    before, after = old.splitlines(), new.splitlines()
    if max(len(before), len(after)) > MAX_COMPARED_LINES:
        return None
    # Without autojunk, which from 200 lines on skips lines that are frequent, such as empty ones.
    steps = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = [(before[step[1] : step[2]], after[step[3] : step[4]], step) for step in steps if step[0] != "equal"]
    if not changed:
        return None  # only the line endings differ
    gone, come, step = changed[0]
    first = " → ".join(repr(shortened(lines[0].strip(), LONGEST_LINE)) for lines in (gone, come) if lines)
    what = "" if gone and come else " is gone" if gone else " is new"
    number = (step[1] if gone else step[3]) + 1
    num_more = sum(max(len(gone), len(come)) for gone, come, _ in changed) - 1
    return f"line {number}: {first}{what}" + (f", and {num_more} more lines" if num_more else "")


def with_changes(planned: Plan, index: Index, kept: Path) -> Plan:
    """Return the plan with reasons that describe how files changed. kept: where contents are recorded by hash."""
    stages = {name: _with_paths(_with_sources(stage, index), kept) for name, stage in planned.stages.items()}
    return replace(planned, stages=stages)


def _with_paths(stage: PlannedStage, kept: Path) -> PlannedStage:
    """Return the planned stage with a reason that says how files in its path fields, such as `task_folder`, changed."""
    reason = stage.reason
    outside = stage.identity["outside"]
    assert isinstance(outside, dict)
    for field, path in stage.config.outside_paths().items():
        if field not in outside:
            continue
        # At every plan, so that the next one has something to compare with.
        keep_contents(kept, str(outside[field]), path)
        differing = next((item for item in stage.differences if item.field == CONTENT + field), None)
        before = kept_contents(kept, str(differing.old)) if differing else None
        if before:
            changes = [*content_changes(before, contents_of(path))]
            reason = reason.replace(str(differing), f"{field}: {_listed(changes, len(changes))}") if changes else reason
    return replace(stage, reason=reason)


def _with_sources(stage: PlannedStage, index: Index) -> PlannedStage:
    """Return the planned stage with a reason that says how the model or data source that it fetches has changed."""
    config = stage.config
    if not isinstance(config, FetchedConfig):
        return stage
    return _with_source(_with_files(stage, config, index), config, index)


def _with_files(stage: PlannedStage, config: FetchedConfig, index: Index) -> PlannedStage:
    differing = next((one for one in stage.differences if one.field == REVISION), None)
    if differing is None or not HUBS[config.source.hub].is_local:
        return stage
    earlier = index.nearest(stage.kind, stage.name, stage.identity)
    if earlier is None:
        return stage
    try:
        before, after = _contents(earlier), HashedFiles(*requested_hashes(config.request))
    except LifecycleError:
        return stage
    names = _changed_names(before, after)
    if not names:
        return stage
    first = [_file_change(name, before, after) for name in names[:MAX_NAMED]]
    words = f"files of {config.source}: {_listed(first, len(names))}"
    return replace(stage, reason=stage.reason.replace(str(differing), words))


def _with_source(stage: PlannedStage, config: FetchedConfig, index: Index) -> PlannedStage:
    """Return the planned stage with its former and present source in its reason: paths are no identity."""
    differing = next((one for one in stage.differences if one.field == config.product), None)
    earlier = index.nearest(stage.kind, stage.name, stage.identity) if differing else None
    if differing is None or earlier is None:
        return stage
    words = f"{config.product} {earlier.record.tags.get('source', differing.old)} → {config.source}"
    return replace(stage, reason=stage.reason.replace(str(differing), words))


def _listed(changes: list[str], num_changes: int) -> str:
    """Return the first changes of files in words, and how many more there are."""
    more = [f"and {num_changes - MAX_NAMED} more files"] if num_changes > MAX_NAMED else []
    return ", ".join([*changes[:MAX_NAMED], *more])


def artifact_changes(old: Artifact, new: Artifact) -> Iterator[str]:
    """Yield how an artifact's content files differ from an older one's, such as `train.jsonl 300 → 350 rows`."""
    before, after = _contents(old), _contents(new)
    return (_file_change(name, before, after) for name in _changed_names(before, after))


def kept_changes(kept: Path, differing: Difference) -> str | None:
    """Describe how a file or folder changed between two recorded hashes; None unless both have contents."""
    before, after = (kept_contents(kept, str(digest)) for digest in (differing.old, differing.new))
    changes = [*content_changes(before, after)] if before and after else []
    return _listed(changes, len(changes)) if changes else None


def _contents(artifact: Artifact) -> HashedFiles:
    folder = CONTENT_FOLDERS[artifact.record.product]
    files = {name: entry["sha256"] for name, entry in artifact.record.files.items() if name.startswith(folder)}
    return HashedFiles(f"{artifact.folder}/{folder}", {name.removeprefix(folder): one for name, one in files.items()})


def _changed_names(before: HashedFiles, after: HashedFiles) -> list[str]:
    return sorted({name for name, _ in before.sha256.items() ^ after.sha256.items()})


def _file_change(name: str, before: HashedFiles, after: HashedFiles) -> str:
    if name not in after.sha256:
        return f"{name} is gone"
    amount = after.amount(name)
    return (
        f"{name} {changed_amount(before.amount(name), amount)}"
        if name in before.sha256
        else f"{name} is new ({amount})"
    )
