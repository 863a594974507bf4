"""Model `builtin/qwen3-1m`: a randomly initialised Qwen3 of 0.8 million parameters, with tokenizer and chat template.

The tokenizer is a byte-level BPE, so that it can encode any text; its merges are learnt from the chats of
`builtin/addition`, where an exchange takes 14 to 17 tokens. Digits are always tokens of their own: sums are learnt
digit by digit. All dims are multiples of 32 with an even number of groups of 32, as 4-bit kernels want them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stages.hubs.builtin.addition import split_problems
from stages.models.model_folder import follow_file_mask
from stages.models.weight_files import WEIGHTS_FILE

SEED = 0
VOCABULARY_SIZE = 288
MAX_POSITIONS = 2048
END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make(folder: Path) -> None:
    """Write the tiny model: config, weights (float32 safetensors), tokenizer and chat template."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    follow_file_mask(folder / WEIGHTS_FILE)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of exactly `VOCABULARY_SIZE` tokens, filled up with reserved ones.

    So no id that an untrained model may produce cannot be decoded.
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
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    num_reserved = VOCABULARY_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|reserved_{index}|>" for index in range(num_reserved)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )


def _texts() -> list[str]:
    """Return the texts of the chats in `builtin/addition`, without special tokens, to train the tokenizer on."""
    pieces = ["\n", "system\n"]
    for problem in split_problems().train:
        pieces += [f"user\n{problem.question}", f"assistant\n{problem.answer}"]
    return pieces


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a Qwen3 model in float32 whose random weights depend only on `SEED`."""
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        # About 1/sqrt(hidden_size): with Transformers' 0.02 sums are learnt after 300 steps or 600, as the seed has it.
        initializer_range=0.08,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    return model
