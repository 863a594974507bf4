"""Model `builtin/qwen3-vl-1m`: a randomly initialised Qwen3-VL of a million parameters, with processor and tokenizer.

Two thirds of the parameters see. A merged patch has 16 × 16 pixels, as a digit of `builtin/digits`. Heads are 32 wide,
and all dims of the language part are even multiples of 32, as 4-bit kernels want them.
"""

from copy import deepcopy
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from stages.hubs.builtin.digits import QUESTION
from stages.hubs.builtin.hub import QWEN3_VL_1M
from stages.hubs.builtin.tokenizer import MAX_POSITIONS, byte_level_tokenizer
from stages.models.model_folder import follow_file_mask
from stages.models.weight_files import WEIGHTS_FILE

SEED = 0
PATCH = {"patch_size": 8, "size": {"shortest_edge": 16 * 16, "longest_edge": 128 * 128}}
"""Side of a patch in pixels, and the fewest and the most pixels of a picture, which is scaled to be between."""
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part['type'] == 'text' %}
                {{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make(folder: Path) -> None:
    """Write the tiny model: config, weights (float32 safetensors), processor, tokenizer and chat template."""
    tokenizer = make_tokenizer()
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**PATCH),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(**PATCH),
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)
    make_model(tokenizer).save_pretrained(folder)
    follow_file_mask(folder / WEIGHTS_FILE)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the model's tokenizer, to which the question of `builtin/digits` is one token."""
    texts = ["\n", "system\n", "user\n", QUESTION, *(f"assistant\n{digit}" for digit in range(10))]
    return byte_level_tokenizer(
        texts * 2,  # merges are of pairs that occur twice
        CHAT_TEMPLATE,
        vocabulary_size=QWEN3_VL_1M["text_config"]["vocab_size"],
        special_tokens=(START, END, IMAGE, VIDEO),
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Return a Qwen3-VL model in float32 whose random weights depend only on `SEED`."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    marks = {"vision_start": START, "vision_end": END, "image": IMAGE, "video": VIDEO}
    sizes = deepcopy(QWEN3_VL_1M)  # Transformers adds to them
    config = Qwen3VLConfig(
        text_config={
            **sizes["text_config"],
            **ends,
            "bos_token_id": None,
            "max_position_embeddings": MAX_POSITIONS,
        },
        vision_config=sizes["vision_config"],
        tie_word_embeddings=True,
        dtype="float32",
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in marks.items()},
        **ends,
    )
    torch.manual_seed(SEED)
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**ends, do_sample=False)
    return model
