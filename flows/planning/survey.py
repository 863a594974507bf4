"""Survey of a person's rows and of a model, whose facts decide what a first recipe says (`lifecycle init`)."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.ledger.home import store_root
from flows.planning.model_shape import ModelConfigs, measured_shape, published_shape
from flows.planning.most_tokens import BYTES_PER_TOKEN, most_tokens, num_bytes
from flows.planning.outside import resolve_outside
from flows.planning.stored import find_stored
from flows.recipe.recipe import load_stages
from flows.recipe.version import identity_of, version_of
from flows.store.store import Store
from stages.core.errors import DataError, LifecycleError, ModelError, RecipeError
from stages.core.redaction import quoted
from stages.core.shipped import shipped
from stages.data.any_rows import REFERENCE_COLUMNS, PromptReader, is_prompt_alone, likeliest_kind
from stages.data.config import ROW_KINDS, DataConfig, DataFormat, KindOfRows, RowKind
from stages.data.files import (
    READERS,
    BadRow,
    FilePart,
    Row,
    RowLocation,
    find_files,
    is_held_out,
    name_of,
    portions,
    read_part,
    read_rows,
)
from stages.data.formats import FORMATS, RowReader, likeliest_format, other_format, rename_columns
from stages.data.media.folder import MediaFolder
from stages.data.media.images import from_data_address
from stages.data.media.rows import TAG
from stages.data.media_reference import MediaReference
from stages.data.messages import Conversation, Document, PlainText, RowError, listed, num_media
from stages.harnesses.question_sets import question_text
from stages.hubs.answers import PLANNING_LIMIT_S
from stages.hubs.fetched import FetchedConfig
from stages.hubs.registry import HUBS, hub_of, parse_source
from stages.models.facts import CONFIG_FILE, ModelFacts
from stages.models.media import SHOWN_TO_ANY, MediaKind
from stages.models.picture_bounds import PictureBounds, usual_sampling, with_picture_bounds
from stages.models.processor_files import reads_media
from stages.models.shape import ModelShape

if TYPE_CHECKING:
    from stages.data.tokenizer import DocumentTokenizer

FIRST_ROWS = 1000
"""Number of rows at a dataset's start that decide the kind of its rows and the share to hold out."""
HELD_OUT_FRACTIONS = (0.05, 0.1, 0.2, 0.5)
"""Candidate shares of held-out rows, of which the first that leaves enough rows to learn and to evaluate is taken."""
HELD_OUT_SPLITS = ("validation", "valid", "val", "dev", "eval", "test")
MAX_QUESTIONS, MAX_PICTURE_BYTES = 200, 64 << 20
"""Most questions of the evaluation task, and most bytes of all their pictures, which are copied beside it."""
IMAGES, MOST_IMAGES = "images", 8
"""Column of a question's pictures in the evaluation task, and the most of them."""
SHORT_ANSWER_CHARACTERS = 40
"""Longest right answer that an answer can be expected to equal."""
MAX_TEXT_CHARACTERS = 4000
"""Most characters of a held-out text that the evaluation task scores."""
SECONDS = 20.0
"""Processor seconds allowed for tokenizing rows; if they do not suffice, tokens are estimated from bytes instead."""
NUM_RENDERED = 200
"""Number of documents that are rendered in order to choose a chat template."""
NO_LIMIT = 1 << 40
TOKENIZER_FILES = (
    CONFIG_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
TEMPLATES = shipped("configs/templates")
QUESTION_NAMES = ("question", "query", "prompt", "problem", "instruction", "input", "user", "human")
ANSWER_NAMES = ("answer", "response", "completion", "solution", "output", "target", "reply", "assistant")


@dataclass(frozen=True)
class KnownModel:
    """Facts about a model (source, shape, longest text) that are known before it is downloaded.

    shape: None where unknown. max_positions: tokens of its longest text. folder: its tokenizer, if on this machine.
    """

    source: str
    shape: ModelShape | None = None
    max_positions: int | None = None
    folder: Path | None = None


@dataclass
class Survey:
    """Facts about a person's rows (format, splits, number of tokens, bad rows) that decide a first recipe.

    form: their format; `auto` of prompts. longest: tokens of the longest row, both answers of a pair together.
    is_counted: whether tokens were counted by the model's own tokenizer; else by bytes, which no tokenizer exceeds.
    questions: of rows that are held out. pictures: encoded, of these questions, by the path that they name.
    """

    kind: RowKind
    form: DataFormat
    columns: dict[str, str]
    split: str
    evaluation_split: str | None = None
    held_out_fraction: float = 0.0
    num_rows: int = 0
    bad_rows: Counter[bool] = field(default_factory=Counter)
    """Number of bad rows among held-out rows (key True) and among training rows (key False)."""
    all_rows: Counter[bool] = field(default_factory=Counter)
    first_bad: str = ""
    num_tokens: int = 0
    longest: int = 0
    is_counted: bool = False
    is_plain: bool = False
    system: str = ""
    template: Path | None = None
    has_template: bool = True
    """True if the model has a chat template of its own, or if it is not known whether it has one."""
    labels: set[bool | None] = field(default_factory=set)
    """Distinct labels (good or bad answer) of the training rows."""
    media_kinds: set[MediaKind] = field(default_factory=set)
    """Kinds of the rows' media."""
    bounds: PictureBounds = field(default_factory=PictureBounds)
    """Rate of a video's frames, where the rows have videos, and the model does not say one."""
    questions: list[dict[str, Any]] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    references: list[str] = field(default_factory=list)

    @property
    def kind_of_rows(self) -> KindOfRows:
        return ROW_KINDS[self.kind]

    @property
    def num_bad_rows(self) -> int:
        """Return the number of bad rows, in training and held-out data together."""
        return self.bad_rows.total()

    @property
    def bad_fraction(self) -> float:
        """Return the share of bad rows, rounded up to a percent: the larger one of training and held-out rows."""
        shares = (self.bad_rows[held_out] / count for held_out, count in self.all_rows.items() if count)
        return math.ceil(100 * max(shares, default=0.0)) / 100

    def add_bad(self, place: RowLocation, reason: str, *, held_out: bool) -> None:
        """Count a bad row, and keep the place and reason of the first one for an error message."""
        self.bad_rows[held_out] += 1
        self.first_bad = self.first_bad or f"{place} {reason}"


def find_model(source: str, scratch: Path) -> KnownModel:
    """Return a model's facts on this machine and, within seconds, its hub. Raises RecipeError for a bad source."""
    path = Path(source).expanduser()
    if "://" not in source and path.is_dir() and (path / CONFIG_FILE).is_file():
        source = f"file://{path.absolute()}"
    try:
        parse_source(source, "model")
    except ValueError as error:
        raise RecipeError(f"reading --model: {error}") from error
    recipe = load_stages("init", Path.cwd(), {"base": {"kind": "download", "model": source}})
    source = str(recipe.fetched["base"].source)  # now with an absolute path
    index = Store(store_root()).index()
    recipe, _ = find_stored(recipe, ["base"], index)
    config = recipe.fetched["base"]
    if HUBS[config.source.hub].is_local:
        folder = Path(config.source.name)
        return _known(source, ModelFacts(folder), folder)
    unreachable: dict[str, str] = {}
    outside = resolve_outside(recipe, ["base"], unreachable)
    if unreachable:
        return KnownModel(source, published_shape(source))
    artifact = index.find(config.kind, version_of(identity_of(config, {}, outside["base"])))
    if artifact and not artifact.damage:
        return _known(source, ModelFacts(artifact.folder / "model"), artifact.folder / "model")
    facts = ModelConfigs(recipe, outside, index, PLANNING_LIMIT_S).of("base")
    return _known(source, facts, _tokenizer_of(config, str(outside["base"]["revision"]), scratch))


def _known(source: str, facts: ModelFacts | None, folder: Path | None) -> KnownModel:
    if facts is None:
        return KnownModel(source, published_shape(source), None, folder)
    try:
        return KnownModel(source, measured_shape(facts), facts.max_positions, folder)
    except ModelError:  # the planner does not know its family
        return KnownModel(source, None, facts.max_positions, folder)


def _tokenizer_of(config: FetchedConfig, revision: str, scratch: Path) -> Path | None:
    """Download only a model's tokenizer into a scratch folder; None if its hub does not provide it now."""
    folder = scratch / "tokenizer"
    folder.mkdir()
    try:
        for name in TOKENIZER_FILES:
            text = hub_of(config.source).read_file(config.source, revision, name)
            if text is not None:
                (folder / name).write_text(text, encoding="utf-8")
    except (LifecycleError, UnicodeDecodeError):
        return None
    return folder if (folder / "tokenizer.json").is_file() else None


def survey(data: Path, columns: Mapping[str, str], model: KnownModel) -> Survey:
    """Read all rows of a dataset and return their facts. Raises DataError if no training method can learn from them."""
    folder, split = _split_of(data)
    files = find_files(folder, split) if data.is_dir() else [data]
    facts = _kind_of(data, folder, files, columns, split)
    held_out = _held_out_files(facts, folder, files) if data.is_dir() else []
    if not held_out and facts.kind_of_rows.has_answers:
        facts.held_out_fraction = _fraction(folder, files)
    documents = [*_read(facts, folder, files), *_read(facts, folder, held_out, all_held_out=True)]
    if facts.pictures:  # of a longer answer the likelihood is scored, which no server says of pictures
        short = [one for one in facts.questions if len(one["answer"]) <= SHORT_ANSWER_CHARACTERS]
        facts.questions = [{**one, IMAGES: one.get(IMAGES, [])} for one in short]
    if not facts.num_rows:
        raise DataError(f"{data} holds no row to learn from: {facts.first_bad or 'it is empty'}")
    if facts.kind_of_rows.has_labels and len(facts.labels) == 1:
        raise DataError(
            f"{data}: all rows to learn from have the same `label`; expected good and bad answers, to learn "
            "the difference"
        )
    if facts.media_kinds:
        _check_media(data, model)
    # The tokens of pictures are counted by a processor, of which no copy is fetched.
    if model.folder and (reads_media(model.folder) or not facts.media_kinds):
        facts.bounds = usual_sampling(model.folder, facts.media_kinds)
        with tempfile.TemporaryDirectory() as room:
            bounded = with_picture_bounds(ModelFacts(model.folder), facts.bounds, Path(room), trust_remote_code=False)
            _read_with(bounded, facts, documents, folder, [files, held_out])
    if facts.num_bad_rows > facts.all_rows.total() / 2:
        raise DataError(
            f"{data} has {facts.num_bad_rows:,} bad rows of {facts.all_rows.total():,}; the first is "
            f"{facts.first_bad}. Fix these rows, or leave them out"
        )
    return facts


def _read_with(
    model: ModelFacts, facts: Survey, documents: Sequence[Document], folder: Path, splits: Sequence[list[Path]]
) -> None:
    """Choose the chat template, and count the tokens of rows."""
    if not facts.is_plain:
        facts.template, facts.has_template = _template_of(model.folder, documents)
    if facts.kind_of_rows.has_answers:
        _count_tokens(facts, folder, splits, model)
    else:
        facts.longest = _longest_prompt(facts, documents, model.folder)


def _check_media(data: Path, model: KnownModel) -> None:
    """Raise DataError for rows with media that a first recipe could not download, or the model not read."""
    if data.is_file():
        raise DataError(
            f"{data} has rows with media; expected the folder that holds both, so that they are downloaded together "
            f"(`--data {data.parent}`)"
        )
    if model.folder and (model.folder / CONFIG_FILE).is_file() and not reads_media(model.folder):
        raise DataError(
            f"{data} has rows with media, and {model.source} has no processor; name a model that reads them (`--model`)"
        )


def _split_of(data: Path) -> tuple[Path, str]:
    """Return a dataset's folder, and the name of the split to train on."""
    if data.exists() and not os.access(data, os.R_OK):
        raise DataError(f"looking for rows: {quoted(str(data), 300)} may not be read; expected read permission")
    if data.is_file():
        return data.parent, "train"
    if not data.is_dir():
        raise DataError(
            f"looking for rows: there is no file or folder {quoted(str(data), 300)}; expected JSONL, JSON, CSV or "
            "Parquet, or a folder of such files"
        )
    try:
        find_files(data, "train")
        return data, "train"
    except DataError as error:
        # Without a split `train`, the word with which all names begin is the split: part-1.jsonl, part-2.jsonl.
        files = [path for path in sorted(data.iterdir()) if path.is_file() and _data_suffix(path)]
        words = {path.name.split(".")[0].replace("_", "-").split("-")[0] for path in files}
        if len(words) != 1:
            raise DataError(
                f"{error} Where several files are to be learned together, put them into a folder `train`, or let "
                "their names begin with one word"
            ) from error
        (word,) = words
        find_files(data, word)
        return data, word


def _data_suffix(path: Path) -> bool:
    from stages.data.files import format_suffix

    return not path.name.startswith(".") and format_suffix(path) in READERS


def _held_out_files(facts: Survey, folder: Path, files: Sequence[Path]) -> list[Path]:
    """Return the files of the dataset's evaluation split, recorded in `facts`; empty without such a split."""
    for split in HELD_OUT_SPLITS:
        try:
            others = find_files(folder, split)
        except DataError:
            continue
        if not set(others) & set(files):
            facts.evaluation_split = split
            return others
    return []


def _fraction(folder: Path, files: list[Path]) -> float:
    """Return the smallest candidate share that holds out 10 rows, or a fifth of under 50; 0 if a side had none."""
    rows = [row.content for row in islice(read_rows(folder, files), FIRST_ROWS) if isinstance(row, Row)]
    counts = {share: sum(is_held_out(row, share) for row in rows) for share in HELD_OUT_FRACTIONS}
    # A share that holds out no row, or all of them, is of no use.
    possible = [share for share, count in counts.items() if 0 < count < len(rows)]
    enough = [share for share in possible if counts[share] >= min(10, len(rows) / 5)]
    # Where no share holds out enough, the largest comes nearest.
    return next(iter(enough or possible[::-1]), 0.0)


def _kind_of(data: Path, folder: Path, files: list[Path], columns: Mapping[str, str], split: str) -> Survey:
    """Decide the kind (prompts, pairs, …) and format of a dataset's first rows, if need be by usual column names."""
    rows = [row.content for row in islice(read_rows(folder, files), FIRST_ROWS) if isinstance(row, Row)]
    objects = [row for row in rows if isinstance(row, dict)]
    if not objects:
        raise DataError(f'{data} holds no row with named columns; expected such as {{"messages": […]}} in each line')
    if missing := [name for name in columns if not any(name in row for row in objects)]:
        raise DataError(f"{data} has no column {listed(missing)}; found {listed(objects[0])}")
    if other := other_format(objects[0]):
        raise DataError(f"{data}: the rows look like {other}")
    guess = dict(columns) or _renamed(objects[0])
    votes: Counter[tuple[RowKind, DataFormat]] = Counter()
    problem = ""
    for row in objects:
        try:
            # A row is of the format of most rows: a few bad ones must not decide it.
            named = rename_columns(row, guess)
        except RowError as error:
            problem = problem or f" {error}"
            continue
        if found := likeliest_kind(named):
            votes[found] += 1
    if not votes and problem:
        raise DataError(f"{data}: the first row{problem}")
    if not votes:
        raise DataError(
            f"{data}: the first row has the columns {listed(objects[0])}, which fit none of the formats "
            f"{', '.join(FORMATS)}. Say what they are, such as `--columns question=prompt,answer=completion` for plain "
            "texts, or `--columns question=query,answer=response` for a chat"
        )
    kind, form = votes.most_common(1)[0][0]
    if not ROW_KINDS[kind].has_answers and not any(_reference(rename_columns(row, guess)) for row in objects):
        raise DataError(
            f"{data} holds prompts without answers ({listed(objects[0])}), from which no method learns alone; expected "
            f"a column of right answers ({', '.join(REFERENCE_COLUMNS)}), or of answers to imitate (`--columns "
            "COLUMN=completion`)"
        )
    return Survey(kind, form, guess, split)


def _reference(row: Mapping[str, Any]) -> bool:
    return any(row.get(name) is not None for name in REFERENCE_COLUMNS)


def _renamed(row: dict[str, Any]) -> dict[str, str]:
    """Return new names for a row's question and answer columns (`query`, …); none if its format is known."""
    named = rename_columns(row, {})
    if likeliest_format(named) or (is_prompt_alone(named) and ("messages" in named or _reference(named))):
        return {}
    texts = {name for name, value in row.items() if isinstance(value, str)}
    question, answer = (
        next((name for name in names if name in texts), None) for names in (QUESTION_NAMES, ANSWER_NAMES)
    )
    if question is None or answer is None or question == answer:
        return {}
    if question == "instruction":  # Dolly's `context` is Alpaca's `input`
        return {answer: "output"} | ({"context": "input"} if "context" in texts else {})
    return {name: ours for name, ours in ((question, "query"), (answer, "response")) if name != ours}


class _Reader:
    """Reader of a dataset's rows as training reads them: documents to learn from, or prompts with right answers."""

    def __init__(self, facts: Survey, media: MediaFolder) -> None:
        has_answers = facts.kind_of_rows.has_answers
        self._prompts = None if has_answers else PromptReader(None, columns=facts.columns, media=media)
        self._answers = RowReader(facts.form, facts.kind, facts.columns, media)

    def read(self, content: object, place: RowLocation) -> tuple[tuple[Document, ...], bool | None, str | None]:
        """Return a row's documents, its label and its right answer. Raises RowError for a bad row."""
        if self._prompts is None:
            documents = self._answers.read(content, place)
            self._answers.margin(content)
            return documents, self._answers.label(content), None
        prompt = self._prompts.read(content, place)
        if prompt.reference is None:
            raise RowError(f"has no right answer; expected {' or '.join(REFERENCE_COLUMNS)}")
        return (prompt.document,), None, prompt.reference


def _read(facts: Survey, folder: Path, files: list[Path], *, all_held_out: bool = False) -> list[Document]:
    """Count all rows, collect held-out questions for the evaluation task, and return the first documents."""
    first: list[Document] = []
    systems: set[str] = set()
    media = MediaFolder.of(folder, files, by_header=True)
    reader = _Reader(facts, media)
    for row in read_rows(folder, files):
        fraction = facts.held_out_fraction
        held_out = all_held_out or (isinstance(row, Row) and bool(fraction) and is_held_out(row.content, fraction))
        facts.all_rows[held_out] += 1
        try:
            if isinstance(row, BadRow):
                raise RowError(row.reason)
            documents, label, reference = reader.read(row.content, row.place)
        except RowError as error:
            facts.add_bad(row.place, str(error), held_out=held_out)
            continue
        facts.num_rows += 1
        facts.is_plain = isinstance(documents[0], PlainText)
        facts.media_kinds |= {medium.kind for document in documents for medium in _media(document)}
        # An estimate, until `_count_tokens` replaces it; the longest row is a bound instead.
        facts.num_tokens += sum(map(num_bytes, documents)) // BYTES_PER_TOKEN
        facts.longest = max(facts.longest, sum(map(most_tokens, documents)))
        if len(first) < FIRST_ROWS:
            first += documents
        if not held_out:
            facts.labels.add(label)
        if reference is not None and len(facts.references) < FIRST_ROWS:
            facts.references.append(reference)
        # Prompts have no held-out rows, but of another split: the first are asked.
        is_asked = held_out or not (facts.kind_of_rows.has_answers or facts.evaluation_split)
        is_asked = is_asked and label is not False and len(facts.questions) < MAX_QUESTIONS
        if is_asked and (question := _question(facts, documents[0], reference, media)):
            facts.questions.append(question)
            systems.add(_system(documents[0]))
    # Several system prompts cannot all be the task's description, so then it has none.
    if len(systems) == 1:
        facts.system = systems.pop()
    return first


def _media(document: Document) -> Sequence[MediaReference]:
    return document.media if isinstance(document, Conversation) else ()


def _system(document: Document) -> str:
    first = document.messages[0] if isinstance(document, Conversation) else {}
    return str(first["content"]) if first.get("role") == "system" else ""


def _question(facts: Survey, document: Document, reference: str | None, folder: MediaFolder) -> dict[str, Any] | None:
    """Return an evaluation question and its answer, or a plain text; None for what cannot be asked, as tool calls.

    Its pictures are copied into `facts.pictures`.
    """
    if isinstance(document, PlainText):
        if not document.prompt:
            return {"text": document.completion[:MAX_TEXT_CHARACTERS]}
        return {"question": document.prompt, "answer": reference or document.completion}
    messages = [message for message in document.messages if message["role"] != "system"]
    answer = reference or (messages[1]["content"] if len(messages) > 1 else "")
    if messages[0]["role"] != "user" or (len(messages) > 1 and "tool_calls" in messages[1]) or not answer.strip():
        return None
    question = {"question": question_text(Conversation(messages[:1])), "answer": str(answer)}
    return _with_pictures(facts, question, document, folder) if document.media else question


def _with_pictures(
    facts: Survey, question: dict[str, Any], document: Conversation, folder: MediaFolder
) -> dict[str, Any] | None:
    """Return a question with the paths of its pictures, copied into `facts.pictures`; None if it cannot be asked."""
    first = next(message for message in document.messages if message["role"] == "user")
    shown = document.media[: num_media([first])]
    if len(question["answer"]) > SHORT_ANSWER_CHARACTERS or {one.kind for one in shown} - SHOWN_TO_ANY:
        return None
    if not 0 < len(shown) <= MOST_IMAGES or len(TAG.findall(question["question"])) != len(shown):
        return None
    copies: dict[str, bytes] = {}
    paths = []
    for one in shown:
        address = folder.data_address(one)
        kind = address.partition(";")[0].rpartition("/")[2]
        paths.append(f"pictures/{one.sha256[:16]}.{kind}")
        copies[paths[-1]] = from_data_address(address)
    if sum(map(len, (facts.pictures | copies).values())) > MAX_PICTURE_BYTES:
        return None
    facts.pictures |= copies
    return {**question, IMAGES: paths}


def _template_of(model: Path, documents: Sequence[Document]) -> tuple[Path | None, bool]:
    """Return the chat template that renders most documents (None: the model's), and whether the model has one."""
    from stages.data.tokenizer import DocumentTokenizer

    own = DocumentTokenizer(model, None, "assistant")
    names = ["turns", "turns-tools"]
    # First in the list: of templates that render equally many documents, `min` takes the first.
    if "<|im_start|>" in own.special_tokens:
        names.insert(0, "chatml-tools")
    candidates = [None, *(path for name in names if (path := TEMPLATES / f"{name}.jinja").is_file())]
    refused = {path: _num_refused(DocumentTokenizer(model, path, "assistant"), documents) for path in candidates}
    # More than all documents refused: there is no template of its own (see `_num_refused`).
    return min(candidates, key=lambda path: refused[path]), refused[None] <= len(documents)


def _num_refused(tokenizer: DocumentTokenizer, documents: Sequence[Document]) -> int:
    num_refused = 0
    for document in documents[:NUM_RENDERED]:
        try:
            tokenizer.render_units([document]) if _has_answer(document) else tokenizer.encode_prompt(document)
        except RowError:
            num_refused += 1
        except DataError:  # there is no template, or it proves no masks
            return len(documents) + 1
    return num_refused


def _has_answer(document: Document) -> bool:
    return isinstance(document, PlainText) or document.messages[-1]["role"] == "assistant"


def _longest_prompt(facts: Survey, documents: Sequence[Document], model: Path) -> int:
    """Return the number of tokens of the longest prompt; if not all prompts were kept, its upper bound from bytes."""
    from stages.data.tokenizer import DocumentTokenizer

    tokenizer = DocumentTokenizer(model, facts.template, "assistant")
    # Only the first documents are kept, and a later prompt may be longer.
    if len(documents) < facts.num_rows:
        return facts.longest
    facts.is_counted = True
    return max(len(tokenizer.encode_prompt(document)[1]) for document in documents)


def _count_tokens(facts: Survey, folder: Path, splits: Sequence[list[Path]], model: ModelFacts) -> None:
    """Tokenize rows as training does; record bad rows and tokens in `facts`, or after `SECONDS` keep estimates."""
    from stages.data.tokenizing import PartTokenizer, Tokenizing, first_rows_read

    config = DataConfig(
        dataset="rows",
        format=facts.form,
        columns=facts.columns,
        split=facts.split,
        evaluation_split=facts.evaluation_split,
        evaluation_fraction=facts.held_out_fraction,
        chat_template=facts.template,
        # No row is too long here: the lengths are what is asked for.
        sequence_length=NO_LIMIT,
        packing=False,
        on_bad_rows="drop",
    )
    estimated, bytes_of_all = facts.longest, facts.num_tokens
    facts.bad_rows, facts.first_bad, facts.num_tokens, facts.longest, facts.is_counted = Counter(), "", 0, 0, True
    # Processor time, so that a busy machine gives the same recipe.
    ends_s = time.process_time() + SECONDS
    # Held-out rows come from files of their own, or are a share of the same files.
    for portion, files in zip(portions(config), [splits[0], splits[1] or splits[0]], strict=False):
        media = MediaFolder.of(folder, files, by_header=True) if facts.media_kinds else None
        reader = RowReader(facts.form, facts.kind, facts.columns, media)
        first_rows_read(reader, portion, read_rows(folder, files))
        tokenizer = PartTokenizer(Tokenizing(portion, config, model, facts.kind, reader, media))
        for path in files:
            part = FilePart(path, name_of(path, folder))
            # Stops in the middle of a file when the time is over.
            rows = takewhile(lambda _: time.process_time() < ends_s, read_part(part))
            for piece in tokenizer.pieces(part, rows):
                for number, reason in piece.notes.bad_rows:
                    facts.add_bad(part.place(number), reason, held_out=portion.name == "evaluation")
                lengths = piece.units.lengths
                facts.num_tokens += int(lengths.sum())
                facts.longest = max(facts.longest, int(lengths.max(initial=0)))
    if time.process_time() >= ends_s:
        # Only a part was counted: its tokens are a lower bound, the bytes of all rows an estimate.
        facts.is_counted, facts.num_tokens, facts.longest = False, max(bytes_of_all, facts.num_tokens), estimated
    facts.num_rows = facts.all_rows.total() - facts.num_bad_rows
