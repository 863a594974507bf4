"""Prompts and their sampled completions as training documents: length checks, and packing into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter

from stages.core.errors import DataError
from stages.data.batch import Batch, Rollouts
from stages.data.config import DEFAULT_DATE
from stages.data.dataset import packed_batch
from stages.data.files import Portion, portions
from stages.data.tokenizer import DocumentTokenizer
from stages.data.units import best_fit_decreasing
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.rollouts import Acting, SamplingOptions
from stages.kinds.train.order import even_micro_batches
from stages.models.facts import ModelFacts
from stages.models.model_folder import end_tokens
from stages.models.processor import MediaProcessor
from stages.models.recorded import noted_date
from stages.rollouts.environments.environment import EnvironmentConfig
from stages.rollouts.environments.episodes import TurnReader
from stages.rollouts.options import PromptOptions
from stages.rollouts.pictures import PromptPictures
from stages.rollouts.prompts import RenderedPrompt, check_pictures, prompt_media, read_prompts
from stages.serving.engine import max_images_of

WIDTH_MULTIPLE = 64
"""Divisor of the width of packed rows, in tokens: GPUs multiply matrices of such sizes fastest."""


@dataclass(frozen=True)
class AnsweredPrompt:
    """Training document of a prompt and its sampled completion, as token ids.

    log_probabilities: the server's, of the completion's tokens, in nats. is_learned: whether those tokens are targets.
    pictures: of the prompt; None for text alone. environment_spans: places in `completion` of what an environment
    wrote.
    """

    prompt: list[int]
    completion: list[int]
    log_probabilities: list[float]
    advantage: float
    is_learned: bool = True
    pictures: PromptPictures | None = None
    environment_spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def learned(self) -> list[bool]:
        """Mask of the completion's tokens that are targets: those that the model wrote, if it is learned."""
        learned = [self.is_learned] * len(self.completion)
        for begin, end in self.environment_spans:
            learned[begin:end] = [False] * len(learned[begin:end])
        return learned

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)

    def cut(self, most_tokens: int) -> AnsweredPrompt:
        """Return the document cut to `most_tokens` tokens, but with at least one token of the completion."""
        room = max(1, most_tokens - len(self.prompt))
        return replace(self, completion=self.completion[:room], log_probabilities=self.log_probabilities[:room])


DOCUMENTS = TypeAdapter(list[AnsweredPrompt])
"""Reader and writer of documents in JSON."""


@dataclass(frozen=True)
class PackedAnswers:
    """Micro-batch of completions without pictures, and its documents, whose pictures are put in when it is used."""

    batch: Batch
    documents: Sequence[AnsweredPrompt]
    processor: MediaProcessor | None

    def seen(self) -> Batch:
        """Return the batch with its documents' pictures, if any. Raises DataError for one that has changed."""
        if self.processor is None:
            return self.batch
        from stages.engines.media import with_media

        # completions of one prompt share its pictures
        of_prompt = {id(one.pictures): one.pictures.images() for one in self.documents if one.pictures}
        images = [of_prompt.get(id(one.pictures), []) for one in self.documents]
        return with_media(self.batch, images, self.processor)


@dataclass(frozen=True)
class Packing:
    """Sizes for packing prompts with completions.

    sequence_length: most tokens of a packed row. most_tokens: of a document. temperature: of the probabilities that
    learn. processor: of the pictures; None if no prompt has some. is_compiled: all packed rows are `sequence_length`
    wide, for which layers are compiled once; else a micro-batch is about as wide as its longest row.
    """

    sequence_length: int
    most_tokens: int
    packing: bool
    micro_batch_size: int
    padding_token: int
    temperature: float = 1.0
    processor: MediaProcessor | None = None
    is_compiled: bool = False

    @property
    def media_tokens(self) -> frozenset[int]:
        """Tokens that stand for pictures, which a completion must not have."""
        return self.processor.media_token_ids if self.processor else frozenset()

    def share(
        self, documents: Sequence[AnsweredPrompt], data_rank: int, data_parallel_size: int
    ) -> list[PackedAnswers]:
        """Pack the documents and return one process's micro-batches, equally many on each; some may be only padding."""
        lengths = [len(one) for one in documents]
        rows = (
            best_fit_decreasing(lengths, self.sequence_length)
            if self.packing
            else [[number] for number in range(len(documents))]
        )
        shares = even_micro_batches(len(rows), self.micro_batch_size, data_rank, data_parallel_size)
        return [self.batch([[documents[number] for number in rows[row]] for row in share]) for share in shares]

    def batch(self, rows: Sequence[Sequence[AnsweredPrompt]]) -> PackedAnswers:
        """Return one micro-batch of completions; its `old_log_probabilities` are zeros, to be computed later."""
        # default: a process's share may be padding alone
        longest = max((sum(map(len, row)) for row in rows), default=2)
        width = longest
        if self.packing:
            aligned = -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
            width = self.sequence_length if self.is_compiled else min(self.sequence_length, aligned)
        batch = packed_batch(
            [_row(row) for row in rows], (self.micro_batch_size, width), padding_token=self.padding_token
        )
        server = torch.zeros(batch.signal.targets.shape)
        for number, row in enumerate(rows):
            begin = 0
            for document in row:
                # Position t predicts token t + 1, so the prompt's last one predicts the completion's first.
                first = begin + len(document.prompt) - 1
                server[number, first : first + len(document.completion)] = torch.tensor(document.log_probabilities)
                begin += len(document)
        rollouts = Rollouts(
            advantages=torch.tensor([document.advantage for row in rows for document in row], dtype=torch.float32),
            old_log_probabilities=torch.zeros(batch.signal.targets.shape),
            # completions that are not learned have no targets
            server_log_probabilities=server.where(batch.signal.has_target, 0.0),
        )
        batch = batch.with_signal(rollouts=rollouts, temperature=self.temperature)
        return PackedAnswers(batch, [document for row in rows for document in row], self.processor)


def _row(documents: Sequence[AnsweredPrompt]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = [np.array(one.prompt + one.completion, dtype=np.int32) for one in documents]
    learned = [np.array([False] * len(one.prompt) + one.learned, dtype=np.bool_) for one in documents]
    return np.concatenate(tokens), np.concatenate(learned), np.array([len(one) for one in documents])


NUM_NAMED = 5


def checked_prompts(
    config: TrainConfig,
    inputs: Mapping[str, Path],
    model: ModelFacts,
    *,
    portion: Portion | None = None,
) -> list[RenderedPrompt]:
    """Read the prompts, by default those to train on; of several environments one after another, as in `parts`.

    inputs: artifacts by stage name. Raises DataError for bad rows, and prompts that leave too little room to answer.
    """
    portion = portion or portions(config.data)[0]
    prompts: list[RenderedPrompt] = []
    for name, part in config.acting.items():
        try:
            own = _prompts_of(config, part, inputs, model, portion)
        except DataError as error:
            raise (DataError(f"the environment {name}: {error}") if name else error) from error
        prompts += [replace(one, environment=name) for one in own]
    return prompts


def _prompts_of(
    config: TrainConfig, part: Acting, inputs: Mapping[str, Path], model: ModelFacts, portion: Portion
) -> list[RenderedPrompt]:
    """Read the prompts of one environment, or of none; raises as `checked_prompts` does."""
    options, data = part.options, part.data
    folder = data.prompt_folder(inputs)
    asked = PromptOptions(
        portion=portion,
        limit=None,
        reference=options.reference,
        reference_field=f"{config.method}.reference",
        system=options.system,
        apply_chat_template=options.apply_chat_template,
        rewards=options.rewards,
        chat_template=data.chat_template,
        columns=data.columns,
        template_date=None if data.template_date == DEFAULT_DATE else data.template_date,
        environment=options.environment,
    )
    prompts = read_prompts(folder, asked, model.folder, prompt_media(folder, portion.split, model.folder))
    check_pictures(prompts, max_images_of(model.folder, options.serving))
    most = most_tokens(config, options, model)
    room = most - options.max_completion_length
    if too_long := [one for one in prompts if len(one.token_ids) > room]:
        named = ", ".join(f"{one.place} ({len(one.token_ids)} tokens)" for one in too_long[:NUM_NAMED])
        raise DataError(
            f"{len(too_long)} of {len(prompts)} prompts do not leave {options.max_completion_length} tokens "
            f"(max_completion_length) of the {most} that the model, sequence_length and serving.max_model_len allow "
            f"together: {named}; raise one of these, lower max_completion_length, or leave these rows out"
        )
    return prompts


def completion_packing(
    config: TrainConfig, options: SamplingOptions, model: ModelFacts, processor: MediaProcessor | None
) -> Packing:
    """Return the options for packing prompts with completions, such as sequence length and micro-batch size."""
    return Packing(
        config.data.sequence_length,
        most_tokens(config, options, model),
        bool(config.data.packing),
        config.layout.micro_batch_size,
        DocumentTokenizer(model.folder, None, "assistant").padding_token,
        options.temperature,
        processor,
        is_compiled=config.layout.compile,
    )


def most_tokens(config: TrainConfig, options: SamplingOptions, model: ModelFacts) -> int:
    """Return the largest number of tokens that a prompt and its completion may have together."""
    limits = (config.data.sequence_length, options.serving.max_model_len, model.max_positions)
    return min(limit for limit in limits if limit)


def turn_readers(
    config: TrainConfig, model: ModelFacts, prompts: Sequence[RenderedPrompt]
) -> dict[str, tuple[EnvironmentConfig, TurnReader]]:
    """Return each environment and the reader of the model's turns in it, by name; {} without environments.

    Raises DataError if the model's chat template is unfit for one.
    """
    date = config.data.template_date
    own_date = (None if date == DEFAULT_DATE else date) or noted_date(model.folder) or DEFAULT_DATE
    tokenizer = DocumentTokenizer(model.folder, config.data.chat_template, "assistant", template_date=own_date)
    readers = {}
    for name, part in config.acting.items():
        if environment := part.options.environment:
            example = next(one for one in prompts if one.environment == name).episode(0).prompt
            readers[name] = environment, TurnReader.proved(tokenizer, end_tokens(model.folder), environment, example)
    return readers
