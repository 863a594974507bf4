"""Sandboxed chat templates cannot run forever, exhaust memory, escape, or read the date."""

import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import jinja2
import pytest

from stages.core.errors import DataError
from stages.data import templates
from stages.data.messages import Conversation, RowError
from stages.data.proved_template import Sandbox
from stages.data.templates import ChatTemplate, TemplateLimitError, read_template
from tests.unit.stages.data.conftest import CHATML

DOUBLES = "{{% set ns = namespace(text='x\\t') %}}{{% for _ in range(99) %}}{}{{% endfor %}}"
SHARED = (
    "{{% set ns = namespace(a=['x' * 99], b=['x' * 99]) %}}{{% for _ in range(40) %}}{{% set ns.a = [ns.a, ns.a] %}}"
    "{{% set ns.b = [ns.b, ns.b] %}}{{% endfor %}}{}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
QUESTION = Conversation([{"role": "user", "content": "a"}])


def run(source, **variables):
    return Sandbox(source, date(2025, 3, 9)).run(variables)[0]


def render(source):
    return ChatTemplate(source, {}, [], "the model's chat template").render_text(QUESTION)


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(templates, "MEMORY_BYTES", 32 << 20)


@pytest.fixture
def little_time(monkeypatch):
    monkeypatch.setattr(templates, "MAX_CPU_SECONDS", 0.2)


@pytest.fixture
def small_limits(little_memory, little_time):
    """Lower the memory limit and the time limit of chat template rendering, for tests that may reach either one."""


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
    ],
)
def test_what_does_not_end_is_ended(source, little_time):
    with pytest.raises(TemplateLimitError, match=r"the model's chat template does not end: it ran for 0\.2 s"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 10 }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{% for _ in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ messages | slice(9999999) | list }}",
        DOUBLES.format("{% set ns.text = ns.text ~ ns.text %}"),
        DOUBLES.format("{% set ns.text = ns.text + ns.text %}"),
        DOUBLES.format("{% set ns.text %}{{ ns.text }}{{ ns.text }}{% endset %}"),
        DOUBLES.format("{% set ns.text = [ns.text, ns.text] | join %}"),
        DOUBLES.format("{% set ns.text = ns.text.join(ns.text) %}"),
        DOUBLES.format("{% set ns.text = ns.text.replace('x', 'x' * 999) %}"),
        DOUBLES.format("{% set ns.text = ns.text.translate({120: 'x' * 999}) %}"),
        DOUBLES.format("{% set ns.text = (ns.text * 9).expandtabs(9999) %}"),
        DOUBLES.format("{% set ns.text = ns.text | indent(9999999, true) %}"),
    ],
)
def test_what_grows_without_end_is_ended(source, little_memory):
    with pytest.raises(TemplateLimitError, match="takes more than 32 MiB of memory"):
        render(source)


@pytest.mark.parametrize("shown", ["{{ ns.a | tojson }}", "{{ ns.a | pprint }}", "{{ ns.a | string }}", "{{ ns.a }}"])
def test_lists_that_share_lists_are_ended(shown, small_limits):
    with pytest.raises(TemplateLimitError):
        render(SHARED.format(shown))


def test_a_long_text_of_a_short_conversation_is_refused():
    with pytest.raises(TemplateLimitError, match="writes more than 262,160 characters for one conversation"):
        render("{{ messages[0].content * 300000 }}")


def test_a_row_that_ends_the_process_is_named_and_others_are_rendered_after_it(small_limits):
    """A row that kills the rendering process is named in the error, and later rows are still rendered.

    Comparing two large values is one step of C, which a time limit's signal cannot interrupt.
    """
    compares = SHARED.format("{{ ns.a == ns.b }}")
    template = ChatTemplate(f"{{% if 'bad' in messages[0].content %}}{compares}{{% endif %}}{CHATML}", {}, [], "it")
    rows = [("text", Conversation([{"role": "user", "content": text}])) for text in ("good", "good", "bad", "good")]
    rendered = template.rendered(rows)
    assert [next(rendered)[0].text for _ in range(2)] == ["<|im_start|>user\ngood<|im_end|>\n"] * 2
    with pytest.raises(TemplateLimitError, match=r"it takes more than a short conversation may, .* exit code"):
        next(rendered)
    assert template.render_text(rows[0][1])


def test_each_conversation_has_limits_of_its_own(small_limits):
    """Limits of memory and time apply to each conversation; 100 of them exceed the time limit together."""
    template = ChatTemplate("{% set text = messages[0].content * 16000000 %}" + CHATML, {}, [], "it")
    assert len(list(template.rendered([("text", QUESTION)] * 100))) == 100


def test_the_process_has_neither_secrets_nor_other_libraries(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "a secret")
    templates._program(os.getpid())[0].close()
    render(CHATML)
    process = Path(f"/proc/{templates._program(os.getpid())[0]._process.pid}")
    assert b"SOME_TOKEN" not in (process / "environ").read_bytes()
    mapped = (process / "maps").read_text()
    assert not any(library in mapped for library in ("torch", "numpy", "tokenizers", "pydantic"))


def test_limits_that_a_user_has_set_are_kept():
    """Chat templates also render under a hard memory limit that the user has set, which no process can raise."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "from stages.data.messages import Conversation\nfrom stages.data.templates import ChatTemplate\n"
        "template = ChatTemplate('{{ messages[0].content }}', {}, [], 'it')\n"
        "print([template.render_text(Conversation([{'role': 'user', 'content': text}])) for text in 'ab'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['a', 'b']\n"


def test_the_error_names_the_template(little_time):
    template = ChatTemplate(ENDLESS, {}, [], "the chat template loop.jinja")
    with pytest.raises(DataError, match=r"the chat template loop\.jinja does not end: it ran for"):
        template.render_text(QUESTION)


def test_a_template_that_cannot_be_compiled_in_its_limits_is_refused_when_it_is_read(little_time, tmp_path):
    (tmp_path / "long.jinja").write_text("{% if a %}{% endif %}" * 40_000)
    with pytest.raises(DataError, match=r"the chat template .*long\.jinja does not end"):
        read_template(tmp_path / "long.jinja")


@pytest.mark.parametrize("source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1] }}"])
def test_nothing_is_changed_and_nothing_outside_is_reached(source):
    with pytest.raises(jinja2.TemplateError):
        run(source, messages=[])


@pytest.mark.parametrize("source", ["{{ 'a' + 1 }}", "{{ 1 // 0 }}", "{{ range(10 ** 6) }}", "{{ messages[0].x.y }}"])
def test_a_mistake_of_the_template_is_an_error_that_names_it(source):
    with pytest.raises(RowError, match="by the model's chat template"):
        render(source)


def test_what_a_template_refuses_is_redacted_before_it_is_cut(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", secret := "s3cr3t" * 20)
    template = ChatTemplate("{{ raise_exception('x' * 150 + messages[0].content) }}", {}, [], "it")
    with pytest.raises(RowError) as error:
        template.render_text(Conversation([{"role": "user", "content": secret}]))
    assert "s3cr3t" not in str(error.value)


@pytest.mark.parametrize(
    "source", ["{% for a in b %}" * 25 + "{% endfor %}" * 25, "{% break %}", f"{{{{ {'9' * 5000} }}}}"]
)
def test_what_jinja_takes_and_python_does_not_is_no_template(source):
    with pytest.raises(DataError, match=r"the model's chat template is not a Jinja template: .*Error"):
        render(source)


def test_half_of_a_character_is_refused():
    with pytest.raises(RowError, match="cannot be rendered by the model's chat template: UnicodeEncodeError"):
        render("{{ '\ud800' }}a")


def test_today_is_the_same_day_in_every_run():
    template = Sandbox("{{ strftime_now('%d %b %Y') }}", date(2025, 3, 9))
    assert template.run({}) == ("09 Mar 2025", [])
    assert template.wrote_date


@pytest.mark.parametrize(
    "source",
    [
        "{{ time | string }}",
        "{{ time | tojson }}",
        "{% macro shown(value) %}{{ value }}{% endmacro %}{{ shown(time) }}",
        "{% macro shown(value) %}{{ value | string }}{% endmacro %}{{ shown(value=time) }}",
    ],
)
def test_a_large_number_in_a_conversation_asks_for_nothing(source):
    assert run(source, time=1_700_000_000) == "1700000000"


def test_ordinary_arithmetic_and_formats_are_left_alone():
    assert run("{{ 7 % 3 }}{{ '%s-%02d' % ('a', 3) }}{{ 'ab' * 3 }}{{ [1] + [2] }}{{ 'a' ~ 1 }}{{ 2 ** 10 }}") == (
        "1a-03ababab[1, 2]a11024"
    )
