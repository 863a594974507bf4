"""Tokenizer of the builtin models: a byte-level BPE, which can encode any text, with merges learnt from given texts.

Digits are always tokens of their own.
"""

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MAX_POSITIONS = 2048
END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def byte_level_tokenizer(
    texts: Iterable[str], chat_template: str, *, vocabulary_size: int, special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of exactly `vocabulary_size` tokens, filled up with reserved ones.

    So no id that an untrained model may produce cannot be decoded. special_tokens: beside those of chats.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            # Without the usual split into words, "user\nWhat is " becomes a single token.
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    num_reserved = vocabulary_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|reserved_{index}|>" for index in range(num_reserved)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        chat_template=chat_template,
        model_max_length=MAX_POSITIONS,
    )
