"""A template can neither run on, nor fill the memory, nor reach out of its sandbox, nor know what day it is."""

from __future__ import annotations

from datetime import date

import jinja2
import pytest

from stages.core.errors import DataError
from stages.data import sandbox
from stages.data.documents import Conversation
from stages.data.messages import RowError
from stages.data.sandbox import Sandbox, TemplateLimitError
from stages.data.templates import ChatTemplate

DOUBLES = "{{% set ns = namespace(text='xx') %}}{{% for _ in range(99) %}}{}{{% endfor %}}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def run(source, **variables):
    return Sandbox(source, date(2025, 3, 9)).run(variables)[0]


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
    ],
)
def test_what_does_not_end_is_ended(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_CPU_SECONDS", 0.1)
    with pytest.raises(TemplateLimitError, match=r"does not end: it ran for 0\.1 s"):
        run(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{% for _ in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        DOUBLES.format("{% set ns.text = ns.text ~ ns.text %}"),
        DOUBLES.format("{% set ns.text = ns.text + ns.text %}"),
        DOUBLES.format("{% set ns.text %}{{ ns.text }}{{ ns.text }}{% endset %}"),
        DOUBLES.format("{% set ns.text = [ns.text, ns.text] | join %}"),
        DOUBLES.format("{% set ns.text = ns.text.replace('x', 'xx') %}"),
    ],
)
def test_what_grows_without_end_is_ended(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", 1 << 20)
    with pytest.raises(TemplateLimitError):
        run(source)


def test_the_error_names_the_template(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_CPU_SECONDS", 0.1)
    template = ChatTemplate(ENDLESS, {}, [], "the chat template loop.jinja")
    with pytest.raises(DataError, match=r"the chat template loop\.jinja does not end: it ran for"):
        template.render_text(Conversation([{"role": "user", "content": "a"}]))


@pytest.mark.parametrize("source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1] }}"])
def test_nothing_is_changed_and_nothing_outside_is_reached(source):
    with pytest.raises(jinja2.TemplateError):
        run(source, messages=[])


@pytest.mark.parametrize("source", ["{{ 'a' + 1 }}", "{{ 1 // 0 }}", "{{ range(10 ** 6) }}", "{{ messages[0].x.y }}"])
def test_a_mistake_of_the_template_is_an_error_that_names_it(source):
    template = ChatTemplate(source, {}, [], "the model's chat template")
    with pytest.raises(RowError, match="by the model's chat template"):
        template.render_text(Conversation([{"role": "user", "content": "a"}]))


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
