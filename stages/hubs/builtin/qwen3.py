"""Model `builtin/qwen3-1m`: a randomly initialised Qwen3 of 0.8 million parameters, with tokenizer and chat template.

The tokenizer is a byte-level BPE, so that it can encode any text; its merges are learnt from the chats of
`builtin/addition`, where an exchange takes 14 to 17 tokens. Digits are always tokens of their own: sums are learnt
digit by digit. All dims are multiples of 32 with an even number of groups of 32, as 4-bit kernels want them.
"""

from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stages.hubs.builtin.addition import split_problems
from stages.hubs.builtin.tokenizer import MAX_POSITIONS, byte_level_tokenizer
from stages.models.model_folder import follow_file_mask
from stages.models.weight_files import WEIGHTS_FILE

SEED = 0
VOCABULARY_SIZE = 288

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
    """Return the model's tokenizer, of exactly `VOCABULARY_SIZE` tokens."""
    return byte_level_tokenizer(_texts(), CHAT_TEMPLATE, vocabulary_size=VOCABULARY_SIZE)


def _texts() -> list[str]:
    """Return the texts of the chats in `builtin/addition`, without special tokens, to train the tokenizer on."""
    pieces = ["\n", "system\n"]
    for problem in split_problems().train:
        pieces += [f"user\n{problem.question}", f"assistant\n{problem.answer}"]
    return pieces


def make_model(tokenizer: PreTrainedTokenizerFast, vocabulary_size: int = VOCABULARY_SIZE) -> Qwen3ForCausalLM:
    """Return a Qwen3 model in float32 whose random weights depend only on `SEED`."""
    config = Qwen3Config(
        vocab_size=vocabulary_size,
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
