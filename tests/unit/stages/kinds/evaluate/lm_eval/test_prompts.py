"""Chat prompts of an evaluation equal those of lm-eval with Transformers, and those of training."""

import json
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from stages.core.errors import DataError, EvaluationError
from stages.data.messages import Conversation
from stages.data.tokenizer import DocumentTokenizer
from stages.kinds.evaluate.config import EvaluateConfig
from stages.models.recorded import note_trained_on
from stages.serving.client import Client
from stages.serving.served_models import ServedModel
from tests.serving import make_model
from tests.unit.stages.data.chat_templates import published

CONTEXT_TOKENS = 1024
CHAT = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": " three <eos>"},
]
PUBLISHED = published()
TEMPLATES = [
    "chatml",
    "phi-4",
    "olmo-2",
    "deepseek-v3.1",
    "command-r",
    "glm-4",
    "llama3",
    "qwen2_5",
    "qwen3",
    "lfm2_v2",
]
"""Names of chat templates that take system prompts, and write no dates or thoughts that training rows lack."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture
def with_template(model: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Provide a function that copies the model, without weights, and gives it another chat template."""

    def change(template: str) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / "chat_template.jinja").write_text(template)
        about = folder / "tokenizer_config.json"
        about.write_text(json.dumps({**json.loads(about.read_text()), "bos_token": "<pad>"}))
        return folder

    return change


def asking(folder: Path):
    """Return our model class for lm-eval, for rendering prompts only: the server that it names does not exist."""
    from stages.harnesses.lm_eval.scoring import LmEvalModel

    tree = {"kind": "evaluate", "model": "sft", "tasks": ["none"], "apply_chat_template": True}
    client = Client("http://127.0.0.1:9", "key", "tiny")
    served = ServedModel(client, folder, CONTEXT_TOKENS, trust_remote_code=False)
    return LmEvalModel(served, EvaluateConfig.model_validate(tree).evaluation)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_lm_eval_and_of_training(with_template, name) -> None:
    folder = with_template(PUBLISHED[name].source)
    ours, own = asking(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{**message, "content": message["content"].replace("<eos>", "")} for message in CHAT]
    begun = [*chat, {"role": "assistant", "content": "It is "}]

    prompt = ours.apply_chat_template(chat)

    assert prompt == own.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    going_on = ours.apply_chat_template(begun, add_generation_prompt=False)
    assert going_on == own.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    answered = Conversation([*chat, {"role": "assistant", "content": "four"}])
    [*_, trained] = DocumentTokenizer(folder, None, "assistant").render_units([answered])
    assert trained[0].text.startswith(prompt)
    assert trained[0].spans[-1][0] == len(prompt)


def test_special_tokens_in_prompts_are_those_of_training(with_template) -> None:
    folder = with_template(PUBLISHED["chatml"].source)
    ours = asking(folder)
    tokenizer = DocumentTokenizer(folder, None, "assistant")
    [unit] = tokenizer.render_units([Conversation([*CHAT, {"role": "assistant", "content": "four"}])])
    [tokens] = tokenizer.encode(unit)
    prompt = ours.tok_encode(ours.apply_chat_template(CHAT), add_special_tokens=False)
    assert tokens.ids[: len(prompt)].tolist() == prompt


def test_a_prompt_has_the_date_that_was_trained_with(with_template) -> None:
    folder = with_template("{{ strftime_now('%d %b %Y') }}" + PUBLISHED["chatml"].source)
    assert asking(folder).apply_chat_template(CHAT).startswith("01 Jan 2026<|im_start|>")
    note_trained_on(folder, conversations=True, template_date=date(2025, 6, 30))
    assert asking(folder).apply_chat_template(CHAT).startswith("30 Jun 2025<|im_start|>")


@pytest.mark.parametrize(
    ("template", "error", "words"),
    [
        ("{{ 'x' * 9999999999 }}", DataError, "the model's chat template takes more than 512 MiB of memory"),
        (
            "{{ raise_exception('no system here') }}",
            EvaluationError,
            "is refused by the model's chat template: 'no system",
        ),
        ("{{ messages.__class__.__mro__ }}", EvaluationError, "access to attribute '__class__'"),
        ("{{ messages[1].content }}", EvaluationError, "leaves out what `system` says in message 1"),
    ],
)
def test_a_chat_template_is_held_to_its_limits(with_template, template, error, words) -> None:
    ours = asking(with_template(template))
    with pytest.raises(error, match=words):
        ours.apply_chat_template(CHAT)


def test_a_chat_template_that_does_not_end_is_ended(with_template, monkeypatch) -> None:
    monkeypatch.setattr("stages.data.templates.MAX_CPU_SECONDS", 0.2)
    ours = asking(with_template("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"))
    with pytest.raises(
        DataError, match=r"the model's chat template does not end: it ran for 0\.2 s on one conversation"
    ):
        ours.apply_chat_template(CHAT)
