"""Model `builtin/qwen3-tools-1m`: as `builtin/qwen3-1m`, with a chat template for tools and merges of calls.

It writes calls as Qwen and Hermes do, so that vLLM's parser of that name reads them.
"""

import re
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from stages.data.calculator import DEFINITION
from stages.data.config import DEFAULT_DATE
from stages.data.messages import Conversation
from stages.data.proved_template import ProvedTemplate
from stages.hubs.builtin.calculator import chats
from stages.hubs.builtin.qwen3 import make_model
from stages.hubs.builtin.tokenizer import END_OF_TURN, START_OF_TURN, byte_level_tokenizer
from stages.models.model_folder import follow_file_mask
from stages.models.weight_files import WEIGHTS_FILE

VOCABULARY_SIZE = 512
TAGS = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
NUM_CHATS = 2000
"""Number of chats from which the tokenizer's merges are learnt."""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make(folder: Path) -> None:
    """Write the tiny model: config, weights (float32 safetensors), tokenizer and chat template."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model(tokenizer, VOCABULARY_SIZE).save_pretrained(folder)
    follow_file_mask(folder / WEIGHTS_FILE)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the model's tokenizer, of exactly `VOCABULARY_SIZE` tokens.

    Tags are tokens of their own, as Qwen's: else one token would hold the end of a prompt and the begin of a call.
    """
    tokenizer = byte_level_tokenizer(_texts(), CHAT_TEMPLATE, vocabulary_size=VOCABULARY_SIZE - len(TAGS))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def _texts() -> list[str]:
    """Return the pieces between special tokens and tags of chats with the calculator, to train the tokenizer on."""
    template = ProvedTemplate(CHAT_TEMPLATE, {}, (), "the template", DEFAULT_DATE)
    rendered = (template.text(Conversation(chat, tools=(DEFINITION,))) for chat in chats(NUM_CHATS))
    between = re.compile("|".join(map(re.escape, (START_OF_TURN, END_OF_TURN, *TAGS))))
    return [piece for text in rendered for piece in between.split(text)]
