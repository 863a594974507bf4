"""Process that renders conversations with untrusted chat templates, within limits of CPU time and memory.

Each of a question's conversations has limits of its own. One beyond them in Python gets an answer that says so; one
beyond them within a single step of C (`tojson` of lists that share lists, a power of huge integers) ends the process,
which is then asked for each conversation alone.
"""

import os
import resource
import time
from collections.abc import Callable
from datetime import date
from typing import Any, TypeVar

import jinja2

from stages.core.program_loop import TimeLimitError, answer_questions, within
from stages.data.messages import Conversation, RowError
from stages.data.proved_template import ProvedTemplate, UnprovedError
from stages.data.turns import MAX_MESSAGES, QuotingError

MAX_TEMPLATES = 16
ANSWER_CHARACTERS = 1 << 22
ANSWER_CPU_S = 5.0
"""CPU seconds after which the process returns what is rendered so far; the client requests the others again."""
QUOTED_CHARACTERS = 1 << 17
"""Largest number of characters of a template or row in an error, before the caller redacts and shortens it."""
BYTES_PER_CHARACTER = 64
"""Bytes of memory per character beyond the fixed limit: four in the messages, several renderings and the answer."""
TEXT_CHARACTERS = 1 << 18
CHARACTERS_PER_CHARACTER = 16
"""Largest length of a rendered text, as a multiple of the conversation's length. Templates add some 20 KiB, and JSON
with indents and escapes is several times as long as its content."""
CPU_S_PER_MESSAGE = 3e-5
"""CPU seconds per rendered message on a slow core, beyond the fixed limit; messages grow with the turns squared."""
GRACE_CPU_S = 1
"""CPU seconds between the limit that raises an error in Python and the one that ends long calls in C by a kill."""

Answered = TypeVar("Answered")


class _LimitError(Exception):
    """Raised when a template exceeds a limit of time, memory or length; continues "the model's chat template "."""


class _Templates:
    """Cache of the chat templates that the rendering process has compiled, by key."""

    def __init__(self) -> None:
        self._compiled: dict[str, ProvedTemplate] = {}
        self._memory = os.open("/proc/self/statm", os.O_RDONLY)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._outer = {limit: resource.getrlimit(limit) for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU)}

    def answer(self, question: dict[str, Any]) -> Any:
        """Return the rendered texts of a request's conversations (at least the first one), and the CPU seconds used.

        None if the template is not cached; the caller then sends its source. An answer has `texts`, each with spans and
        dropped thoughts, and `date`; or `row`: what is wrong with it, or `template`: what is wrong with every row, each
        as parts (`QuotingError`); or `limit`.
        """
        begin_s = time.process_time()
        answers = self._answers(question)
        return None if answers is None else {"answers": answers, "cpu_s": time.process_time() - begin_s}

    def _answers(self, question: dict[str, Any]) -> list[dict[str, Any]] | None:
        key, cpu_s, memory_bytes = question["key"], question["cpu_s"], question["memory_bytes"]
        if key not in self._compiled:
            if "source" not in question:
                return None
            if problem := self._compile(question):
                return [problem]
        answers: list[dict[str, Any]] = []
        num_characters, ends_s = 0, time.process_time() + ANSWER_CPU_S
        for work, messages, others in question["conversations"]:
            conversation = Conversation(messages, **others)
            num_messages = len(messages)
            row_cpu_s = cpu_s + CPU_S_PER_MESSAGE * min(num_messages * num_messages, MAX_MESSAGES)
            num_given = _num_characters(conversation)
            row_bytes = memory_bytes + BYTES_PER_CHARACTER * num_given
            try:
                answer = self._limited(row_cpu_s, row_bytes, _rendered, self._compiled[key], work, conversation)
                _check_lengths(answer, TEXT_CHARACTERS + CHARACTERS_PER_CHARACTER * num_given)
            except _LimitError as error:
                answer = {"limit": str(error)}
            answers.append(answer)
            num_characters += sum(len(text) for text, *_ in answer.get("texts", ()))
            if num_characters > ANSWER_CHARACTERS or time.process_time() > ends_s:
                break
        return answers

    def _compile(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Compile and cache a request's chat template; return an error answer if that fails, else None."""
        source = question["source"]
        begin = f"{source['name']} is not a Jinja template: "
        while len(self._compiled) >= MAX_TEMPLATES:
            del self._compiled[next(iter(self._compiled))]  # the oldest
        try:
            template = self._limited(question["cpu_s"], question["memory_bytes"], _compiled, source)
        except _LimitError as error:
            return {"limit": str(error)}
        except jinja2.TemplateSyntaxError as error:
            return {"template": [begin, error.message or "", f" in line {error.lineno}"]}
        except RecursionError:
            return {"template": [f"{source['name']} is nested too deeply to be read; write it otherwise"]}
        except Exception as error:  # of Python, about the code that Jinja makes of it: `{% break %}` without a loop
            return {"template": [f"{begin}{type(error).__name__}: ", str(error)]}
        self._compiled[question["key"]] = template
        return None

    def _limited(self, cpu_s: float, memory_bytes: int, work: Callable[..., Answered], *arguments: Any) -> Answered:
        """Call `work` within limits of CPU seconds and memory; raise _LimitError beyond them."""
        # The first number is the size of the address space, in pages.
        num_pages = int(os.pread(self._memory, 32, 0).split(maxsplit=1)[0])
        self._lower(resource.RLIMIT_AS, num_pages * self._page_bytes + memory_bytes)
        self._lower(resource.RLIMIT_CPU, int(time.process_time() + cpu_s) + GRACE_CPU_S)
        try:
            return within(cpu_s, work, *arguments)
        except TimeLimitError:
            raise _LimitError(f"does not end: it ran for {cpu_s:.3g} s on one conversation") from None
        except MemoryError:
            raise _LimitError(f"takes more than {memory_bytes >> 20} MiB of memory") from None
        finally:
            for limit, outer in self._outer.items():
                # Allowed without privileges, since only soft limits were lowered.
                resource.setrlimit(limit, outer)

    def _lower(self, limit: int, value: int) -> None:
        """Lower a resource limit of this process for one call; a stricter limit from its start is kept."""
        soft, hard = self._outer[limit]
        resource.setrlimit(limit, (value if soft == resource.RLIM_INFINITY else min(value, soft), hard))


def _compiled(source: dict[str, Any]) -> ProvedTemplate:
    return ProvedTemplate(**{**source, "today": date.fromisoformat(source["today"])})


def _rendered(template: ProvedTemplate, work: str, conversation: Conversation) -> dict[str, Any]:
    template.forget_date()
    try:
        if work in ("together", "separately"):
            documents = template.documents(conversation, together=work == "together")
            texts = [(one.text, one.spans, one.num_dropped_thoughts) for one in documents]
        else:
            text = template.text(conversation, add_generation_prompt=work == "prompt")
            texts = [(text, ((0, len(text)),), 0)]
    except UnprovedError as error:
        return {"template": _cut(error.parts)}
    except QuotingError as error:
        return {"row": _cut(error.parts)}
    except RowError as error:
        return {"row": [str(error)]}
    return {"texts": texts, "date": template.wrote_date}


def _check_lengths(answer: dict[str, Any], max_characters: int) -> None:
    if any(len(text) > max_characters for text, *_ in answer.get("texts", ())):
        raise _LimitError(f"writes more than {max_characters:,} characters for one conversation")


def _cut(parts: tuple[str, ...]) -> list[str]:
    return [part[:QUOTED_CHARACTERS] for part in parts]


def _num_characters(conversation: Conversation) -> int:
    messages, others = conversation.messages, (conversation.tools, conversation.variables)
    num_characters = sum(len(str(other)) for other in others if other)
    return num_characters + sum(
        len(one["content"]) if len(one) == 2 and isinstance(one["content"], str) else len(str(one)) for one in messages
    )


if __name__ == "__main__":
    answer_questions(lambda: _Templates().answer)
