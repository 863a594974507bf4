"""Tokenizer of the zoo's vocabulary: a word for each of 64 token ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

NUM_WORDS = 64


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer into a model's folder."""
    tokenizer = Tokenizer(WordLevel({f"n{number}": number for number in range(NUM_WORDS)}, unk_token="n0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="n0", eos_token="n0", chat_template="{{ messages }}"
    ).save_pretrained(folder)
