"""Prompts made from a dataset's rows, rendered by the model's chat template and checked before any model is asked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from stages.core.errors import DataError
from stages.data.any_rows import Prompt, PromptReader
from stages.data.config import DEFAULT_DATE
from stages.data.files import BadRow, Row, RowLocation, find_files, read_rows
from stages.data.media.embedded import without_pixels
from stages.data.media.folder import MediaFolder
from stages.data.media.rows import MediaSource
from stages.data.media_reference import MediaReference
from stages.data.messages import Conversation, Document, PlainText, RowError, Tool, make_message
from stages.data.templates import TemplateLimitError
from stages.data.tokenizer import DocumentTokenizer
from stages.models.media import MediaKind
from stages.models.processor_files import reads_media
from stages.models.recorded import is_asked_as_chat, noted_date
from stages.rewards.reward import Completion, RowCheck
from stages.rollouts.environments.episodes import EpisodeStart
from stages.rollouts.options import PromptOptions
from stages.rollouts.pictures import PromptPictures

NUM_NAMED = 10
"""Largest number of rows that an error message lists."""
MADE = "the environment's rows"
"""Name of the place of rows that no file has."""


@dataclass(frozen=True)
class RenderedPrompt:
    """Prompt of a dataset row, rendered by the chat template, as text and as the token ids that the model reads.

    pictures: None for text alone. environment: name of that of several in which its episodes are played, else "".
    """

    place: RowLocation
    prompt: Prompt
    text: str
    token_ids: list[int]
    address: Callable[[MediaReference], str] | None = None
    """Function that returns the `data:` address of one of the prompt's pictures."""
    pictures: PromptPictures | None = None
    environment: str = ""

    def episode(self, seed: int) -> EpisodeStart:
        """Return the beginning of an episode with this prompt."""
        assert isinstance(self.prompt.document, Conversation)
        return EpisodeStart(self.prompt.document, self.token_ids, self.prompt.row, seed, self.environment)

    def completion(self, text: str, num_tokens: int) -> Completion:
        """Return a model's answer together with this prompt and its dataset row, in the form that rewards judge."""
        asked = self.prompt
        return Completion(self.text, text, num_tokens, asked.reference, asked.row, asked.document, self.address)


def read_prompts(
    folder: Path | None,
    options: PromptOptions,
    tokenizer_folder: Path,
    media: MediaSource | None = None,
    model_folder: Path | None = None,
) -> list[RenderedPrompt]:
    """Read the prompts in a dataset's `folder`, check them, and render them by the model's chat template.

    folder: None for the rows that the environment makes itself.
    tokenizer_folder: of the model or adapter that is asked. media: source of the rows' media; None refuses them.
    model_folder: of an adapter's base, whose processor reads them. Raises DataError, with the bad rows, for rows that
    are no prompts or lack what a reward needs, or no rows; ModelError for a folder without a usable tokenizer.
    """
    # the recipe's date, that of the model's training, or a fixed one: never today's, which would change the prompts
    own_date = options.template_date or noted_date(tokenizer_folder) or DEFAULT_DATE
    tokenizer = DocumentTokenizer(
        tokenizer_folder, options.chat_template, "assistant", template_date=own_date, processor_folder=model_folder
    )
    as_chat = options.apply_chat_template
    source, chosen = _chosen_rows(folder, options)
    prompts: list[RenderedPrompt] = []
    bad: list[str] = []
    with ExitStack() as stack:
        checks = {name: stack.enter_context(reward.row_checks()) for name, reward in options.rewards.items()}
        as_chat = is_asked_as_chat(tokenizer_folder) if as_chat is None else as_chat
        rows = _Rows(options, tokenizer, as_chat, checks, media)
        for row in islice(chosen, options.limit):
            try:
                if isinstance(row, BadRow):
                    raise RowError(row.reason)
                prompts.append(rows.asked(row.place, row.content))
            except RowError as error:
                bad.append(f"{row.place} {error}")
            except TemplateLimitError as error:
                raise DataError(f"{row.place}: {error}") from error
    if bad:
        named = "\n".join(f"  {row}" for row in bad[:NUM_NAMED])
        more = f"\n  … and {len(bad) - NUM_NAMED} more" if len(bad) > NUM_NAMED else ""
        raise DataError(f"{len(bad)} of {len(bad) + len(prompts)} rows are no prompts:\n{named}{more}\nFix these rows.")
    if not prompts:
        held_out = f" for {options.portion.name}" if options.portion.fraction else ""
        raise DataError(f"no prompts{held_out}: no rows of {source}")
    return prompts


def _chosen_rows(folder: Path | None, options: PromptOptions) -> tuple[str, Iterator[Row | BadRow]]:
    """Return where the rows of a portion come from, in words, and the rows: of a dataset, or of the environment.

    Rows with one question, which tasks with few questions make, are held out together: none of them is learned.
    """
    if folder:
        files = find_files(folder, options.portion.split)
        names = ", ".join(path.name for path in files)
        return f"{names} of {folder}", options.portion.select(read_rows(folder, files))
    environment = options.environment
    assert environment and environment.makes_rows, "the recipe's check has asked for a dataset"
    made = (Row(RowLocation(MADE, number, "row"), row) for number, row in enumerate(environment.rows(), 1))
    return MADE, options.portion.select(made, "prompt")


def prompt_media(folder: Path | None, split: str, model_folder: Path) -> MediaFolder | None:
    """Return the source of media of a dataset's prompts, as `media_of`; None for rows that an environment makes."""
    return media_of(folder, split, model_folder) if folder else None


def check_room(prompts: Sequence[RenderedPrompt], context_tokens: int, max_tokens: int) -> None:
    """Raise DataError, with the prompts' places, if prompts leave no room for `max_tokens` of answer in the context."""
    room = context_tokens - max_tokens
    if too_long := [one for one in prompts if len(one.token_ids) > room]:
        named = ", ".join(f"{one.place} ({len(one.token_ids)} tokens)" for one in too_long[:NUM_NAMED])
        raise DataError(
            f"{len(too_long)} of {len(prompts)} prompts have more than {room} tokens, which is what the server's "
            f"{context_tokens} leave beside max_tokens {max_tokens}: {named}; raise serving.max_model_len, lower "
            "max_tokens, or leave these rows out"
        )


def check_pictures(prompts: Sequence[RenderedPrompt], max_images: int) -> None:
    """Raise DataError, with the prompts' places, if some have more pictures than a server takes with one request."""
    if too_many := [one for one in prompts if one.pictures and len(one.pictures.media) > max_images]:
        named = ", ".join(str(one.place) for one in too_many[:NUM_NAMED])
        raise DataError(
            f"{len(too_many)} of {len(prompts)} prompts have more than {max_images} pictures, which is what the server "
            f"takes with one request: {named}; raise serving.max_images, or leave these rows out"
        )


def media_kinds(prompts: Sequence[RenderedPrompt]) -> set[MediaKind]:
    """Return the kinds of media that prompts have; empty for text alone."""
    return {medium.kind for one in prompts if one.pictures for medium in one.pictures.media}


def media_of(folder: Path, split: str, model_folder: Path) -> MediaFolder | None:
    """Return a dataset's folder as the source of its rows' media; None for a model that reads text alone."""
    return MediaFolder.of(folder, find_files(folder, split)) if reads_media(model_folder) else None


class _Rows:
    """Maker of prompts from a dataset's rows."""

    def __init__(
        self,
        options: PromptOptions,
        tokenizer: DocumentTokenizer,
        as_chat: bool,
        checks: Mapping[str, RowCheck],
        media: MediaSource | None,
    ) -> None:
        """Create the maker of prompts. checks: each reward's check of rows, by the reward's name."""
        self._options = options
        self._checks = checks
        self._tokenizer = tokenizer
        self._as_chat, self._media = as_chat, media
        self._tools = options.environment.definitions if options.environment else ()
        self._reader = PromptReader(options.reference, options.reference_field, options.columns, media)

    def asked(self, place: RowLocation, row: object) -> RenderedPrompt:
        """Return a row's rendered prompt; RowError if it is none or lacks what a reward needs."""
        prompt = self._reader.read(row, place)
        for name, reward in self._options.rewards.items():
            if reward.NEEDS_REFERENCE and prompt.reference is None:
                raise RowError(
                    f"has no right answer, which the reward {name} compares with; expected an answer, or a column that "
                    f"`{self._options.reference_field}` names"
                )
            if problem := self._checks[name](prompt.reference, prompt.row):
                raise RowError(f"{problem}, which the reward {name} cannot do without")
        if self._options.environment:
            self._options.environment.check_row(prompt.row)
        # rewards need no pictures of rows that hold them, and all rows are in memory
        kept = without_pixels(prompt.row) if self._media else prompt.row
        prompt = replace(prompt, document=self._as_asked(prompt.document), row=kept)
        text, token_ids = self._tokenizer.encode_prompt(prompt.document)
        address = self._media.data_address if self._media else None
        return RenderedPrompt(place, prompt, text, token_ids, address, self._pictures(prompt.document))

    def _pictures(self, document: Document) -> PromptPictures | None:
        if not isinstance(self._media, MediaFolder) or not isinstance(document, Conversation) or not document.media:
            return None
        return PromptPictures(self._tokenizer.unexpanded(document), document.media, self._media)

    def _as_asked(self, document: Conversation | PlainText) -> Conversation | PlainText:
        if isinstance(document, PlainText):
            if not self._as_chat and not self._options.environment:
                if self._options.system:
                    raise RowError("is plain text, which has no place for `system`; expected messages")
                return document
            document = Conversation([make_message("user", document.prompt)])
        if self._options.environment:
            document = _for_episodes(document, self._tools)
        if self._options.system and document.messages[0]["role"] != "system":
            return replace(document, messages=[make_message("system", self._options.system), *document.messages])
        return document


def _for_episodes(document: Conversation, tools: tuple[Tool, ...]) -> Conversation:
    """Return the conversation up to the last question, with the environment's tools. Raises RowError for others."""
    if document.tools and document.tools != tools:
        raise RowError("has `tools` that are not those of the environment; expected the same, or none")
    last = max(number for number, message in enumerate(document.messages, 1) if message["role"] == "user")
    if document.media:
        raise RowError("has media, which episodes do not read; expected text alone")
    return replace(document.before(last), tools=tools)
