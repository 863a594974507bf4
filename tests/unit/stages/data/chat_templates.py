"""Chat templates of published models: those that TRL ships, and others in a shortened form of the same structure.

Written by hand for each template: what its generation prompts end with (the text right before a turn), what ends a
turn, and what the template cannot render: `system`, `thoughts` (a field), `tools` (definitions), `calls`, `parallel`
calls, text `beside` calls.
"""

from dataclasses import dataclass
from pathlib import Path

import trl

WRITTEN_MARKERS = """
    <s> </s> <|endoftext|> <|im_start|> <|im_end|> <|im_sep|> <|begin_of_text|> <|eot_id|> <|eom_id|> <|python_tag|>
    <|start_header_id|> <|end_header_id|> <|end|> <|system|> <|user|> <|assistant|> <|tool|> <|/tool|> <|tool_call|>
    <|return|> <|start|> <|message|> <|channel|> <|call|> <bos> <start_of_turn> <end_of_turn> <|turn> <turn|>
    <|tool_response> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>
    <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> [gMASK] <sop>
    <|observation|> <|start_of_role|> <|end_of_role|> <|end_of_text|> [INST] [/INST] [TOOL_CALLS]
    [TOOL_RESULTS] [/TOOL_RESULTS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] <|eom|> <|eot|>
    <|end_of_turn|>
"""
MARKERS = tuple(WRITTEN_MARKERS.split())
BOTH = (("bos_token", "<s>"), ("eos_token", "</s>"))


@dataclass(frozen=True)
class Published:
    """Chat template of a published model, with the texts that the template writes right before and after an answer."""

    source: str
    before: tuple[str, ...]
    end: tuple[str, ...]
    lacks: str = "thoughts tools calls"
    special_tokens: tuple[tuple[str, str], ...] = BOTH


OWN = {
    "phi-4-mini": Published(
        "{% for message in messages %}{% if message['role'] == 'system' and tools %}"
        "{{ '<|system|>' + message['content'] + '<|tool|>' + tools | tojson + '<|/tool|><|end|>' }}"
        "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}",
        ("<|assistant|>",),
        ("<|end|>", "<|end|><|endoftext|>"),
        special_tokens=(("eos_token", "<|endoftext|>"),),
    ),
    "phi-4": Published(
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] "
        "+ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
        ("<|im_start|>assistant<|im_sep|>",),
        ("<|im_end|>",),
    ),
    "chatml": Published(
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>assistant\n",),
        ("<|im_end|>",),
    ),
    "zephyr": Published(
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
        "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n' + message['content'] + eos_token }}\n"
        "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
        ("<|assistant|>\n",),
        ("</s>",),
    ),
    "mistral-0.1": Published(
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
        "{{ message['content'] + eos_token }}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}"
        "{% endfor %}",
        ("[/INST]",),
        ("</s>",),
        lacks="system thoughts tools calls",
    ),
    "mistral-0.3": Published(  # the system prompt and the tools go into the last question
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}"
        "{% set questions = rest | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}"
        "{% for message in rest %}{% if message.role == 'user' %}"
        "{% if tools and message == questions[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% if loop.last and system is defined %}{{ '[INST] ' + system + '\n\n' + message.content + '[/INST]' }}"
        "{% else %}{{ '[INST] ' + message.content + '[/INST]' }}{% endif %}"
        "{% elif message.tool_calls is defined and message.tool_calls %}[TOOL_CALLS] ["
        "{% for call in message.tool_calls %}{% if call.id is not defined or call.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
        "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{{ ', ' if not loop.last else '' }}"
        "{% endfor %}]{{ eos_token }}"
        "{% elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}"
        "{% elif message.role == 'tool' %}[TOOL_RESULTS] {{ message.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}",
        ("[/INST]", "[/TOOL_RESULTS]"),
        ("</s>",),
        lacks="thoughts beside",
    ),
    "llama-2": Published(
        "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
        "{% for message in rest %}{% if message.role == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + message.content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        ("[/INST]",),
        ("</s>",),
    ),
    "olmo-2": Published(
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
        "{{ '<|assistant|>\n' + message.content + eos_token + ('' if loop.last else '\n') }}"
        "{% else %}{{ '<|' + message.role + '|>\n' + message.content + '\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        ("<|assistant|>\n",),
        ("<|endoftext|>",),
        special_tokens=(("bos_token", "<|endoftext|>"), ("eos_token", "<|endoftext|>")),
    ),
    "falcon-3": Published(
        "{% for message in messages %}{% if message.role == 'assistant' %}{% if not loop.last %}"
        "{{ '<|assistant|>\n' + message.content + eos_token + '\n' }}{% else %}"
        "{{ '<|assistant|>\n' + message.content + eos_token }}{% endif %}"
        "{% else %}{{ '<|' + message.role + '|>\n' + message.content + '\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        ("<|assistant|>\n",),
        ("<|endoftext|>",),
        special_tokens=(("eos_token", "<|endoftext|>"),),
    ),
    "granite-3": Published(  # writes the date
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
        "{% else %}{% set system = 'Today is ' + strftime_now('%B %d, %Y') + '.' %}{% set rest = messages %}{% endif %}"
        "{{ '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}"
        "{% if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\n' }}"
        "{% endif %}{% for message in rest %}{% if message.role == 'tool' %}"
        "{{ '<|start_of_role|>tool_response<|end_of_role|>' + message.content + '<|end_of_text|>\n' }}{% else %}"
        "{{ '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content }}"
        "{% if message.tool_calls %}{{ '<|tool_call|>' + message.tool_calls | map(attribute='function') | list | tojson"
        "}}{% endif %}{{ '<|end_of_text|>\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
        "{% endfor %}",
        ("<|start_of_role|>assistant<|end_of_role|>",),
        ("<|end_of_text|>",),
        lacks="thoughts",
    ),
    "smollm-3": Published(  # with or without thoughts, by the system prompt
        "{% set thinks = enable_thinking if enable_thinking is defined else true %}"
        "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %B %Y') + '\nReasoning Mode: ' "
        "+ ('/think' if thinks else '/no_think') + '\n' }}"
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{{ '<|im_end|>\n' }}"
        "{% for message in messages %}{% if message.role == 'user' %}"
        "{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}{% elif message.role == 'assistant' %}"
        "{% if thinks %}{{ '<|im_start|>assistant\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}"
        "{% else %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}"
        "{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}{% if thinks %}"
        "{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n' }}{% endif %}"
        "{% endif %}",
        ("<|im_start|>assistant\n",),
        ("<|im_end|>",),
        lacks="tools calls",
    ),
    "deepseek-v2": Published(
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
        "{{ 'User: ' + message.content + '\n\n' }}{% elif message.role == 'assistant' %}"
        "{{ 'Assistant: ' + message.content + eos_token }}{% elif message.role == 'system' %}"
        "{{ message.content + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        ("Assistant:",),
        ("<｜end▁of▁sentence｜>",),
        special_tokens=(("bos_token", "<｜begin▁of▁sentence｜>"), ("eos_token", "<｜end▁of▁sentence｜>")),
    ),
    "deepseek-v3.1": Published(  # arguments as text; thoughts only asked for, never shown
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        "{% set ns = namespace(system='', in_tool=false, last_user=false) %}"
        "{% for message in messages if message.role == 'system' %}{% set ns.system = ns.system + message.content %}"
        "{% endfor %}{{ bos_token + ns.system }}{% if tools %}{{ '\n\n## Tools\n' + tools | tojson }}{% endif %}"
        "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last_user = true %}"
        "{{ '<｜User｜>' + message.content }}"
        "{% elif message.role == 'assistant' and message.tool_calls %}"
        "{% if ns.last_user %}{{ '<｜Assistant｜></think>' }}{% endif %}{% set ns.last_user = false %}"
        "{% for call in message.tool_calls %}{% if loop.first %}"
        "{{ (message.content or '') + '<｜tool▁calls▁begin｜>' }}{% endif %}"
        "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments "
        "+ '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
        "{% elif message.role == 'assistant' %}{% if ns.last_user %}{{ '<｜Assistant｜>' }}{{ '</think>' }}{% endif %}"
        "{% set ns.last_user = false %}{% set content = message.content %}{% if '</think>' in content %}"
        "{% set content = content.split('</think>', 1)[1] %}{% endif %}{{ content + '<｜end▁of▁sentence｜>' }}"
        "{% elif message.role == 'tool' %}{% set ns.last_user = false %}"
        "{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and ns.last_user %}{{ '<｜Assistant｜>' }}"
        "{% if thinking %}{{ '<think>' }}{% else %}{{ '</think>' }}{% endif %}{% endif %}",
        ("<｜Assistant｜></think>", "<｜Assistant｜><think>", "<｜tool▁output▁end｜>"),
        ("<｜end▁of▁sentence｜>",),
        special_tokens=(("bos_token", "<｜begin▁of▁sentence｜>"), ("eos_token", "<｜end▁of▁sentence｜>")),
        lacks="",
    ),
    "qwq": Published(  # the prompt opens the thoughts, what was said has none
        "{% if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
        "{% endif %}{% for message in messages %}{% if message.role == 'user' %}"
        "{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}{% elif message.role == 'assistant' %}"
        "{% set content = message.content.split('</think>')[-1].lstrip('\n') %}"
        "{{ '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
        ("<|im_start|>assistant\n<think>\n",),
        ("<|im_end|>",),
        lacks="tools calls",
    ),
    "command-r": Published(
        "{{ bos_token }}{% for message in messages %}{% set role = {'user': '<|USER_TOKEN|>', 'assistant': "
        "'<|CHATBOT_TOKEN|>', 'system': '<|SYSTEM_TOKEN|>'}[message.role] %}"
        "{{ '<|START_OF_TURN_TOKEN|>' + role + message.content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
        ("<|CHATBOT_TOKEN|>",),
        ("<|END_OF_TURN_TOKEN|>",),
    ),
    "glm-4": Published(  # the next speaker ends a turn
        "[gMASK]<sop>{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("<|assistant|>\n",),
        ("",),
    ),
    "openchat-3.5": Published(  # roles are words, no line ever breaks
        "{{ bos_token }}{% for message in messages %}{{ 'GPT4 Correct ' + message.role.title() + ': ' "
        "+ message.content + '<|end_of_turn|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}",
        ("GPT4 Correct Assistant:",),
        ("<|end_of_turn|>",),
    ),
    "vicuna": Published(
        "{% for message in messages %}{% if message.role == 'system' %}{{ message.content + ' ' }}"
        "{% elif message.role == 'user' %}{{ 'USER: ' + message.content + ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' + message.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
        ("ASSISTANT:",),
        ("</s>",),
    ),
    "alpaca": Published(
        "{% for message in messages %}{% if message.role == 'user' %}{{ '### Instruction:\n' + message.content + '\n\n'"
        "}}{% elif message.role == 'assistant' %}{{ '### Response:\n' + message.content + eos_token + '\n\n' }}"
        "{% else %}{{ message.content + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
        ("### Response:\n",),
        ("</s>",),
    ),
}

CHATML = (("<|im_start|>assistant\n", "<think>\n", "<think></think>", "</think>\n\n"), ("<|im_end|>",))
DEEPSEEK = (("<｜Assistant｜><think>\n", "<｜tool▁outputs▁end｜>"), ("<｜end▁of▁sentence｜>",))
LLAMA = (("<|start_header_id|>assistant<|end_header_id|>\n\n",), ("<|eot_id|>", "<|eom_id|>"))
GEMMA = (("<start_of_turn>model\n",), ("<end_of_turn>",))
PHI = (("<|assistant|>\n",), ("<|end|>", "<|end|>\n<|endoftext|>"))
TRL = {
    "cohere": (("<|CHATBOT_TOKEN|>",), ("<|END_OF_TURN_TOKEN|>",), "thoughts tools calls"),
    "cohere2": (("<|START_RESPONSE|>",), ("<|END_OF_TURN_TOKEN|>",), "thoughts tools calls"),
    "deepseek_r1_distill": (DEEPSEEK[0], (*DEEPSEEK[1], "<｜tool▁call▁end｜>"), "tools"),
    "deepseekv3": (*DEEPSEEK, "tools again"),
    "gemma": (*GEMMA, "system thoughts tools calls"),
    "gemma3": (*GEMMA, "thoughts tools calls"),
    "glm4moe": (("<|assistant|>",), ("",), ""),
    "gptoss": (("<|start|>assistant",), ("<|return|>", "<|call|>"), "parallel"),
    "lfm2": (*CHATML, "thoughts calls"),
    "lfm2_v2": (*CHATML, "thoughts"),
    "lfm2_2_5": (*CHATML, ""),
    "llama3": (*LLAMA, "thoughts tools calls"),
    "llama3_1": (*LLAMA, "thoughts parallel beside"),
    "llama3_2": (*LLAMA, "thoughts parallel beside"),
    "nemotron_3_nano": (*CHATML, ""),
    "nemotron_3_super": (*CHATML, ""),
    "nemotron_3_ultra": (*CHATML, ""),
    "nemotron_3_5_lightning": (*CHATML, ""),
    "phi3": (*PHI, "thoughts tools calls"),
    "phi3_5": (*PHI, "thoughts tools calls"),
    "qwen2_5": (*CHATML, "thoughts"),
    "qwen3": (*CHATML, ""),
    "qwen3_5_nothink": (*CHATML, ""),
    "qwen3_5_think": (*CHATML, ""),
    "qwen3_6": (*CHATML, ""),
    "qwen3_8": (*CHATML, ""),
    "qwen3_instruct_2507": (*CHATML, "thoughts"),
    "gemma4_v5": (("<|turn>model\n", "<tool_response|>", "<turn|>\n"), ("<turn|>", "<|tool_response>"), ""),
    "muse_glimmer": (("<|start|>assistant",), ("<|eot|>", "<|eom|>"), "beside"),
}
SPECIAL_TOKENS = {
    "deepseek": (("bos_token", "<｜begin▁of▁sentence｜>"), ("eos_token", "<｜end▁of▁sentence｜>")),
    "phi3": (("bos_token", "<s>"), ("eos_token", "<|endoftext|>")),
}


def trl_template(name: str) -> str:
    """Return the source of a chat template that TRL ships."""
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def published() -> dict[str, Published]:
    """Return all published chat templates, by name."""
    found = dict(OWN)
    for name, turns in TRL.items():
        tokens = next((tokens for prefix, tokens in SPECIAL_TOKENS.items() if name.startswith(prefix)), BOTH)
        found[name] = Published(trl_template(name), *turns, tokens)
    return found
