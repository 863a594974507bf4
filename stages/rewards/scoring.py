"""Scoring of completions by a reward model in a folder, in batches on the GPU or CPU."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from stages.core.errors import DataError, ModelError
from stages.data.config import DEFAULT_DATE
from stages.data.messages import Document, PlainText, RowError, make_message
from stages.data.templates import TemplateLimitError
from stages.data.tokenizer import DocumentTokenizer
from stages.models.facts import ModelFacts
from stages.models.loading import load_model
from stages.models.recorded import noted_date
from stages.rewards.reward import Completion

BATCH_TOKENS = 8192
"""Tokens, padding included, up to which a reward model's batch is filled; a longer text is scored alone."""


class Scorer:
    """Function that scores completions by a reward model, whose weights are read at the first call."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer in the reward model's folder. Raises ModelError when there is no usable one."""
        self._folder = folder
        self._device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        date = noted_date(folder) or DEFAULT_DATE
        self._tokenizer = DocumentTokenizer(folder, None, "all", template_date=date)

    def __call__(self, completions: Sequence[Completion]) -> Iterator[float]:
        """Yield each completion's score; raise DataError for one that cannot be encoded."""
        encoded = [self._encoded(completion) for completion in completions]
        scores = iter(self._scores([tokens for tokens in encoded if not isinstance(tokens, DataError)]))
        for tokens in encoded:
            if isinstance(tokens, DataError):
                raise tokens
            yield next(scores)

    @cached_property
    def _model(self) -> Any:
        model = load_model(self._folder, head="score")
        return model.to(self._device).eval()

    @property
    def _longest(self) -> int | None:
        return getattr(self._model.config.get_text_config(), "max_position_embeddings", None)

    def _encoded(self, completion: Completion) -> list[int] | DataError:
        """Return the token ids of prompt and answer for the reward model, or the error of encoding them."""
        try:
            (tokens,) = self._tokenizer.encode([self._tokenizer.render(_answered(completion))])
        except RowError as error:
            return DataError(f"the prompt {error} (as the chat template of the reward model has it)")
        except TemplateLimitError as error:
            return error
        if self._longest and len(tokens) > self._longest:
            return DataError(f"has {len(tokens)} tokens; the reward model reads {self._longest} at most")
        return [int(token) for token in tokens.ids]

    def _scores(self, rows: list[list[int]]) -> list[float]:
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))  # equal lengths need little padding
        scores: dict[int, float] = {}
        while order:
            # order[0] is the longest row left, to which the batch is padded. Without a padding token Transformers
            # refuses batches of more than one row.
            size = max(1, BATCH_TOKENS // len(rows[order[0]])) if self._padding is not None else 1
            batch, order = order[:size], order[size:]
            scores |= zip(batch, self._forward([rows[number] for number in batch]), strict=True)
        return [scores[number] for number in range(len(rows))]

    @property
    def _padding(self) -> int | None:
        padding: int | None = self._model.config.get_text_config().pad_token_id
        return padding

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]]) -> list[float]:
        longest = max(map(len, rows))
        padded = [row + [self._padding or 0] * (longest - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        ids = torch.tensor(padded, device=self._device)
        logits = self._model(input_ids=ids, attention_mask=torch.tensor(mask, device=self._device)).logits  # [rows, 1]
        values: list[float] = logits.float().squeeze(-1).tolist()
        return values


def check_score_head(folder: Path) -> None:
    """Raise ModelError unless the model is a reward model, with a head that gives one number per answer."""
    config = ModelFacts(folder).config
    architectures = config.get("architectures") or []
    num_labels = len(config.get("id2label") or ("LABEL_0", "LABEL_1"))  # Transformers' default is two
    if num_labels != 1 or not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise ModelError(
            f"{folder} is {', '.join(architectures) or 'of no named architecture'} with {num_labels} labels; expected "
            "a sequence classification with one, as `method: reward` trains it"
        )


def _answered(completion: Completion) -> Document:
    document = completion.document
    if isinstance(document, PlainText):
        return replace(document, completion=completion.text)
    return replace(document, messages=[*document.messages, make_message("assistant", completion.text)])
