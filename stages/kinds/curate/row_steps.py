"""Curation steps that judge one row at a time (length, patterns, language, decontamination), masking, and rewards.

py3langid identifies languages, naive Bayes over bytes, offline and deterministic (Lui and Baldwin 2012, langid.py).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import regex

from stages.core.contract import StageContext
from stages.core.errors import DataError, EvaluationError
from stages.core.redaction import quoted
from stages.data.any_rows import AnyRowReader, ReadRow
from stages.data.media.folder import MediaFolder
from stages.data.messages import Document, PlainText, RowError, texts_of
from stages.data.personal_data import redacted
from stages.harnesses.registry import harness_of
from stages.kinds.curate.config import CurateConfig, Decontaminate, Language, Length, Patterns, Quality
from stages.kinds.curate.contamination import SHORTEST_WHOLE, Benchmarks
from stages.kinds.curate.spool import SourcePlace, SpooledRow
from stages.rewards.judging import judging
from stages.rewards.reward import Completion, RewardContext

LONGEST_CHARACTERS = 4000
"""Number of characters at a row's beginning by which its language is identified; more would only take longer."""
FEWEST_LETTER_BYTES = 20
"""Smallest number of UTF-8 bytes of letters for which a language is identified; bytes count a letter's information."""
SEARCH_TIMEOUT_S = 5.0
"""Time limit in seconds for searching one pattern in one row, as some patterns take exponential time."""
SHOWN_CHARACTERS = 60
RowStep = Callable[[ReadRow], str | None]
ROWS_AT_A_TIME = 256
KEPT_FOLDER = "rewards"


def row_steps(config: CurateConfig, benchmarks: Benchmarks | None) -> Iterator[tuple[str, RowStep]]:
    """Yield the requested single-row steps in order: name, and function that returns the reason to drop a row, or None.

    benchmarks: samples that rows may not hold, for `decontaminate`.
    """
    if length := config.length:
        yield "length", lambda row: too_short_or_long(row, length)
    if patterns := config.patterns:
        yield "patterns", lambda row: found_or_not(row, patterns)
    if language := config.language:
        yield "language", language_filter(language)
    if benchmarks:
        yield "decontaminate", benchmarks.reason


def first_reason(steps: Sequence[tuple[str, RowStep]], place: SourcePlace, row: ReadRow) -> tuple[str, str] | None:
    """Return the first curation step that drops a row, and the reason, or None. A DataError names the row."""
    for name, step in steps:
        try:
            reason = step(row)
        except DataError as error:
            raise DataError(f"`{name}`: {place} {error}") from error
        if reason:
            return name, reason
    return None


def benchmarks_of(config: Decontaminate, context: StageContext) -> Benchmarks:
    """Read the samples of the benchmark tasks for decontamination; warns if some are too short to search for."""
    context.doing("reading the tasks of the evaluations")
    evaluations = [tasks.evaluation for tasks in config.benchmarks.values()]
    items = (item for evaluation in evaluations for item in harness_of(evaluation).items(evaluation, context))
    benchmarks = Benchmarks(config, items)
    if not benchmarks.num_items:
        raise EvaluationError("the tasks to decontaminate against have no samples; name others")
    if benchmarks.num_too_short:
        context.warn(
            f"{benchmarks.num_too_short} of {benchmarks.num_items} samples say fewer than {SHORTEST_WHOLE} words: "
            "whether rows hold them was not looked for"
        )
    context.milestone(f"rows are compared with {benchmarks.num_items} samples, by runs of {config.words} words")
    return benchmarks


def too_short_or_long(row: ReadRow, bounds: Length) -> str | None:
    """Return why a row is too short or long, or None; raise DataError for a row without turns if these are counted."""
    characters = sum(len(text) for texts in row.parts for text in texts)
    measured = {"characters": characters}
    if bounds.counts_turns:
        if row.num_turns is None:
            raise DataError("is plain text, which has no turns for `length` to count; bound its characters")
        measured["turns"] = row.num_turns
    for unit, number in measured.items():
        least, most = getattr(bounds, f"min_{unit}"), getattr(bounds, f"max_{unit}")
        if number < least:
            return f"has {number} {unit}, fewer than min_{unit}, {least}"
        if most is not None and number > most:
            return f"has {number} {unit}, more than max_{unit}, {most}"
    return None


def found_or_not(row: ReadRow, patterns: Patterns) -> str | None:
    """Return why the recipe's patterns drop a row, or None; raise DataError for a search beyond `SEARCH_TIMEOUT_S`."""
    text = "\n".join(text for texts in row.parts for text in texts)
    for pattern in patterns.exclude:
        if match := _searched(pattern, text):
            return f"holds {quoted(match[0], SHOWN_CHARACTERS)}, which the pattern {pattern!r} excludes"
    for pattern in patterns.require:
        if not _searched(pattern, text):
            return f"holds nothing like {pattern!r}, which is required"
    return None


def _searched(pattern: str, text: str) -> regex.Match[str] | None:
    try:
        return regex.search(pattern, text, timeout=SEARCH_TIMEOUT_S)
    except TimeoutError as error:
        raise DataError(
            f"has {len(text)} characters, in which the search for {pattern!r} takes over {SEARCH_TIMEOUT_S:g} s; write "
            "a pattern without repetitions of repetitions"
        ) from error


def language_filter(config: Language) -> RowStep:
    """Return the curation step that drops rows by language, which py3langid identifies."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # takes a second

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def reason(row: ReadRow) -> str | None:
        text = "\n".join(text for texts in row.parts for text in texts)[:LONGEST_CHARACTERS]
        if len("".join(filter(str.isalpha, text)).encode()) < FEWEST_LETTER_BYTES:
            return None  # too few letters to tell
        ranked = identifier.rank(text)
        probability_kept = sum(probability for language, probability in ranked if language in config.keep)
        if probability_kept >= config.min_probability:
            return None
        language, probability = ranked[0]
        return (
            f"is {language} with probability {probability:.2f}, and {' or '.join(config.keep)} with "
            f"{probability_kept:.2f}, less than {config.min_probability:g}"
        )

    return reason


def redacted_row(
    row: ReadRow, kinds: Collection[str], counts: Counter[str], reader: AnyRowReader
) -> tuple[ReadRow, tuple[str, str] | None]:
    """Return a row with its personal data masked, and step and reason to drop it if that makes it invalid.

    counts: of what was masked, which it adds to. reader: of the dataset's rows.
    """
    content = redacted(row.content, kinds, counts)
    try:
        return reader.read(content), None
    except RowError as error:
        return row, ("redact", f"{error}, once personal data are written over")


def scored(config: Quality, rows: Iterable[SpooledRow], context: StageContext) -> Iterator[tuple[int, float]]:
    """Yield each row's number and its answer's summed rewards; raise DataError unless it has exactly one answer."""
    readers: dict[str, AnyRowReader] = {}
    own = RewardContext(context.inputs, context.scratch / KEPT_FOLDER, context.warn)
    with judging(config.rewards, own) as judge:
        remaining = iter(rows)
        while batch := list(itertools.islice(remaining, ROWS_AT_A_TIME)):
            named = []
            for row in batch:
                media = MediaFolder.of(context.inputs[row.place.dataset] / "data", ())
                read = readers.setdefault(row.place.dataset, AnyRowReader(media)).read(row.content, row.place.place)
                try:
                    completion = replace(_completion(read, config.reference), address=media.data_address)
                    named.append((str(row.place), completion))
                except DataError as error:
                    raise DataError(f"`quality`: {row.place} {error}") from error
            for row, judgement in zip(batch, judge(named), strict=True):
                yield row.number, judgement.total


def _completion(row: ReadRow, column: str | None) -> Completion:
    """Return a row's last answer as a completion that rewards can score; the text before the answer is the prompt."""
    if row.is_prompt or len(row.documents) > 1:
        found = "is a prompt alone, without an answer" if row.is_prompt else "is a pair of two answers"
        raise DataError(f"{found}; `quality` judges rows of one answer")
    (document,) = row.documents
    if isinstance(document, PlainText):
        prompt, answer = document.prompt, document.completion
        asked: Document = replace(document, completion="")
    else:
        *before, last = document.messages
        prompt, answer = "\n".join(text for message in before for text in texts_of(message)), last["content"]
        asked = replace(document, messages=before, unlearned=frozenset())
    reference = None if column is None else row.content.get(column)
    if column is not None and reference is None:
        raise DataError(f"has nothing in `{column}`, which `quality.reference` names")
    return Completion(prompt, answer, 0, None if reference is None else str(reference), row.content, asked)
