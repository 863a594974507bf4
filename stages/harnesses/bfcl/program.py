"""Program with BFCL's questions, tools and checkers: `python -m stages.harnesses.bfcl.program LIMITS`.

LIMITS is JSON: `folder` for what the package writes, `with_tools`, `timeout_s` and `memory_bytes` of a question. Runs
in BFCL's environment, and imports only those modules of ours that need the standard library alone. BFCL evaluates
what a model wrote as Python, also while it decodes an answer. So whatever reads an answer runs in a child process,
which opens no connection, starts no process, writes no file, and has limits of time and memory; each
begins as the imports left it.
"""

import contextlib
import functools
import importlib
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.core.program_loop import RefusedError, answer_questions
from stages.rewards import code_program

ANSWER_BYTES = 16 << 20
"""Largest number of bytes of a child's answer."""
SHOWN_CHARACTERS = 2000
STANDARD_STREAMS = 3
MODEL = "served"
"""Name of the served model among BFCL's, by which its checkers know whether names of functions have dots."""


def begin(limits: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Import BFCL, and return the function from a question to its answer."""
    os.chdir(limits["folder"])
    # Where the package writes results, locks and scores: by default beside itself, in site-packages.
    os.environ["BFCL_PROJECT_ROOT"] = limits["folder"]
    os.environ["OPENAI_API_KEY"] = "none"  # its handler makes a client, which nothing asks
    benchmark = Benchmark(**limits)
    if problem := benchmark.alone(lambda: None).get("failed"):
        raise RefusedError(f"answers of a model would be run as code, which this machine cannot confine: {problem}")
    answers: dict[str, Callable[..., Any]] = {
        "questions": benchmark.questions,
        "steps": benchmark.steps,
        "verdict": benchmark.verdict,
    }

    def answer(question: dict[str, Any]) -> Any:
        ((name, arguments),) = question.items()
        return answers[name](*arguments)

    return answer


class Benchmark:
    """BFCL's questions and checkers for one model."""

    def __init__(self, folder: str, with_tools: bool, timeout_s: float, memory_bytes: int) -> None:
        """Import BFCL. with_tools: the model calls tools of its chat template, and does not write Python."""
        from bfcl_eval.constants import model_config
        from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING
        from bfcl_eval.eval_checker import eval_runner
        from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler

        self._runner, self._with_tools = eval_runner, with_tools
        self._timeout_s, self._memory_bytes = timeout_s, memory_bytes
        # Tools of chat templates have no dots in their names, as those of OpenAI.
        model_config.MODEL_CONFIG_MAPPING[MODEL] = model_config.ModelConfig(
            MODEL, MODEL, "", "", "", OpenAICompletionsHandler, is_fc_model=with_tools, underscore_to_dot=with_tools
        )
        self._handler = eval_runner.get_handler(MODEL)
        # A child opens no files of the package.
        for name, module in CLASS_FILE_PATH_MAPPING.items():
            if not name.startswith(("Memory", "WebSearch")):
                importlib.import_module(module)
        self._entries = functools.cache(self._read_entries)

    def questions(self, category: str, limit: int | None) -> list[dict[str, Any]]:
        """Return the first questions of a category: messages and tools by turn, and the expected answers."""
        from bfcl_eval.utils import load_dataset_entry

        answers = self._entries(category)
        asked = load_dataset_entry(category, include_prereq=False)[:limit]
        return [{**self._question(one), "expected": answers[one["id"]][1]} for one in asked]

    def _question(self, entry: dict[str, Any]) -> dict[str, Any]:
        from bfcl_eval.constants import default_prompts
        from bfcl_eval.model_handler import utils

        turns, added = entry["question"], entry.get("missed_function", {})
        functions, tools = list(entry["function"]), []
        if not self._with_tools:
            turns[0] = utils.system_prompt_pre_processing_chat_model(turns[0], functions, entry["id"])
        for number, messages in enumerate(turns):
            if new := added.get(str(number)):
                functions += new
                text = default_prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
                if not self._with_tools:
                    text = default_prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=new)
                messages.append({"role": "user", "content": text})
            style = self._handler.model_style
            tools.append(utils.convert_to_tool(functions, utils.GORILLA_TO_OPENAPI, style) if self._with_tools else [])
        # The same list for each turn but where functions are added.
        changes = [number for number, now in enumerate(tools) if number == 0 or now != tools[number - 1]]
        return {
            "id": entry["id"],
            "turns": turns,
            "tools": {number: tools[number] for number in changes},
            "most_steps": default_prompts.MAXIMUM_STEP_LIMIT if "involved_classes" in entry else 0,
        }

    def steps(self, category: str, identity: str, answers: list[Any]) -> dict[str, Any]:
        """Run the calls of all answers since the beginning; return what the tools answered to the last one's.

        `results` is None if the last answer calls nothing, which ends the model's turn.
        """
        self._entries(category)  # a child opens no files
        return self.alone(lambda: self._steps(category, identity, answers))

    def _steps(self, category: str, identity: str, answers: Sequence[Any]) -> dict[str, Any]:
        from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
        from bfcl_eval.model_handler import utils

        entry, _ = self._entries(category)[identity]
        decoded: list[str] = []
        results: list[str] = []
        for answer in answers:
            try:
                decoded = self._handler.decode_execute(answer, has_tool_call_tag=False)
            except Exception:  # as BFCL does: whatever cannot be decoded calls nothing
                return {"results": None}
            if multi_turn_utils.is_empty_execute_response(decoded):
                return {"results": None}
            results, _ = multi_turn_utils.execute_multi_turn_func_call(
                decoded,
                entry["initial_config"],
                entry["involved_classes"],
                MODEL,
                identity,
                long_context="long_context" in category,
            )
        if self._with_tools:
            return {"results": results}
        answers_decoded = {"model_responses_decoded": decoded}
        return {"results": [utils.format_execution_results_prompting({}, results, answers_decoded)]}

    def verdict(self, category: str, identity: str, answer: Any) -> dict[str, Any]:
        """Return BFCL's verdict on an answer: `valid`, and why not."""
        self._entries(category)  # a child opens no files
        return self.alone(lambda: self._verdict(category, identity, answer))

    def _verdict(self, category: str, identity: str, answer: Any) -> dict[str, Any]:
        from bfcl_eval import utils
        from bfcl_eval.constants.enums import Language, ReturnFormat

        entry, expected = self._entries(category)[identity]
        named: dict[str, Any] = {"prompt_entry": entry, "model_name": MODEL, "test_category": category}
        runner, answered = self._runner, (self._handler, identity, answer)
        if utils.is_relevance_or_irrelevance(category):
            judgement = runner._evaluate_single_relevance_entry(*answered, **named)
        elif utils.is_multi_turn(category):
            judgement = runner._evaluate_single_multi_turn_entry(*answered, expected, **named)
        else:
            language = "JAVASCRIPT" if utils.is_js(category) else "JAVA" if utils.is_java(category) else "PYTHON"
            judgement = runner._evaluate_single_ast_entry(
                *answered, expected, **named, language=Language[language], return_format=ReturnFormat[language]
            )
        error = judgement.get("error")
        details = error if isinstance(error, dict) else judgement
        why = details.get("error_message", error)
        return {
            "valid": bool(judgement["valid"]),
            "error_type": details.get("error_type"),
            "error": None if why is None else str(why)[:SHOWN_CHARACTERS],
        }

    def _read_entries(self, category: str) -> dict[str, tuple[dict[str, Any], Any]]:
        """Return a category's entries as checkers want them, with their expected answers, by `id`."""
        from bfcl_eval import utils

        entries = utils.load_dataset_entry(category, include_prereq=False, include_language_specific_hint=False)
        if utils.is_relevance_or_irrelevance(category):
            return {entry["id"]: (entry, None) for entry in entries}
        # By place, as BFCL does: some have another identifier there.
        answers = utils.load_ground_truth_entry(category)
        pairs = zip(entries, answers, strict=True)
        return {entry["id"]: (entry, answer["ground_truth"]) for entry, answer in pairs}

    def alone(self, work: Callable[[], Any]) -> dict[str, Any]:
        """Return what `work` returns in a confined child process, as {"answer": …}, or {"failed": reason}."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            self._work_alone(work, writing)
        os.close(writing)
        try:
            content, problem = self._read(reading)
        finally:
            os.close(reading)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        if problem is None and not content:
            problem = f"its process ended with {_ending(status)}"
        if problem:
            return {"failed": problem}
        try:
            found: dict[str, Any] = json.loads(content)
        except ValueError:
            return {"failed": "its process gave no JSON"}
        return found

    def _work_alone(self, work: Callable[[], Any], writing: int) -> None:
        """Confine this process, a child, and write what `work` returns; the process ends here."""
        try:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in range(STANDARD_STREAMS):
                os.dup2(nowhere, stream)
            # Also the pipe to the process that asks, on which an answer could be forged.
            os.closerange(STANDARD_STREAMS, writing)
            os.closerange(writing + 1, os.sysconf("SC_OPEN_MAX"))
            cpu_s = math.ceil(self._timeout_s)
            code_program.confine(cpu_s, self._memory_bytes, file_bytes=0, writable=[Path(os.devnull)])
            content = {"answer": work()}
        except BaseException as error:  # whatever a model's text raises, `SystemExit` as well
            content = {"failed": f"{type(error).__name__}: {_text_of(error)}"[:SHOWN_CHARACTERS]}
        with contextlib.suppress(BaseException):
            left = memoryview(json.dumps(content).encode())
            while left:
                left = left[os.write(writing, left) :]
        os._exit(0)

    def _read(self, reading: int) -> tuple[bytes, str | None]:
        """Return what a child wrote until it closed its pipe, and what was wrong with it."""
        content = bytearray()
        end_s = time.monotonic() + self._timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            if not select.select([reading], [], [], left_s)[0]:
                break
            piece = os.read(reading, 1 << 16)
            if not piece:
                return bytes(content), None
            content += piece
            if len(content) > ANSWER_BYTES:
                return b"", f"it gave more than {ANSWER_BYTES >> 20} MiB"
        return b"", f"it took more than {self._timeout_s:g} s"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # a class that a model's text made
        return ""


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit code {code}"


if __name__ == "__main__":
    answer_questions(lambda: begin(json.loads(sys.argv[1])))
