"""Preview of a dataset's prompts for `lifecycle look`, before any model is asked."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stages.data.look import MAX_SHOWN_TOKENS, histogram, shown_document, shown_picture
from stages.data.summaries import DataLook, ShownDocument, ShownPortion, ShownRow, TokenSpan
from stages.data.tokenizer import DocumentTokenizer
from stages.rollouts.prompts import RenderedPrompt


def look_at_prompts(
    prompts: Sequence[RenderedPrompt], tokenizer_folder: Path, num_rows: int, model_folder: Path | None = None
) -> DataLook:
    """Return a preview of the first `num_rows` prompts with their right answers, and counts over all prompts.

    model_folder: of an adapter's base, whose processor reads pictures.
    """
    lengths = np.array([len(prompt.token_ids) for prompt in prompts])
    tokenizer = DocumentTokenizer(tokenizer_folder, None, "assistant", processor_folder=model_folder)
    portion = ShownPortion(
        name="prompts",
        num_source_rows=len(prompts),
        num_rows=len(prompts),
        num_documents=len(prompts),
        num_tokens=int(lengths.sum()),
        num_target_tokens=0,
        sequence_length=None,
        padding_fraction=0.0,
        over_long="fail",
        num_over_long=0,
        num_bad_rows=0,
        dropped=(),
        lengths=histogram(lengths),
    )
    return DataLook(
        what="prompts", portions=(portion,), rows=tuple(_row(prompt, tokenizer) for prompt in prompts[:num_rows])
    )


def _row(asked: RenderedPrompt, tokenizer: DocumentTokenizer) -> ShownRow:
    tokens = np.array(asked.token_ids, np.int32)
    prompt = shown_document("prompt", tokens, np.zeros(len(tokens), np.bool_), tokenizer, MAX_SHOWN_TOKENS)
    if asked.pictures:
        seen = zip(asked.pictures.media, asked.pictures.images(), strict=True)
        prompt = prompt.model_copy(update={"pictures": tuple(shown_picture(*one, tokenizer) for one in seen)})
    reference = asked.prompt.reference
    return ShownRow(name=str(asked.place), documents=(prompt, *([] if reference is None else [_answer(reference)])))


def _answer(reference: str) -> ShownDocument:
    """Return a prompt's right answer as text for a preview; its token count is 0, since the model never sees it."""
    return ShownDocument(name="right answer", num_tokens=0, num_target_tokens=0, pieces=(TokenSpan(text=reference),))
