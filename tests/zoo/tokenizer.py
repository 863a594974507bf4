"""Tokenizer of the zoo's vocabulary: a letter or digit for each token id.

It is of the kind (byte-level BPE) that every family's class of tokenizers reads, and llama.cpp, too.
"""

import string
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<end>"
MERGED = ("8", "9")
"""The one pair of characters that is a token, as llama.cpp takes no tokenizer without any."""
CHARACTERS = (END, *string.ascii_letters, *string.digits, "".join(MERGED))
NUM_WORDS = len(CHARACTERS)


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer into a model's folder."""
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(CHARACTERS)}, [MERGED]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=END, eos_token=END, chat_template="{{ messages }}"
    ).save_pretrained(folder)


def text_of(token_ids: Iterable[int]) -> str:
    """Return the text of token ids, of single letters and digits."""
    return "".join(CHARACTERS[number] for number in token_ids)
