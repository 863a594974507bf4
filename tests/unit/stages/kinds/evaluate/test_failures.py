"""A mistake in an evaluation task is not blamed on the server, even if the server dies meanwhile."""

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from stages.core.contract import StageContext
from stages.core.errors import EvaluationError, TransientError
from stages.harnesses import registry
from stages.harnesses.harness import Results
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.evaluate.run import run
from tests.hub_repository import model_files
from tests.tiny_engine import TinyEngine
from tests.unit.stages.kinds.evaluate.exact_match import ExactMatch


class Mistaken(ExactMatch):
    """Evaluation harness that fails on a mistake in its task while the server is still starting."""

    def evaluate(self, evaluation, context, await_model) -> Results:
        raise KeyError("tset")


class Unlucky(ExactMatch):
    """Evaluation harness whose server is killed while it sends requests."""

    def evaluate(self, evaluation, context, await_model) -> Results:
        await_model()
        own = str(evaluation.task_folder.parent)  # other tests' servers may be children of this process, too
        children = psutil.Process().children(recursive=True)
        lines = [child.as_dict(["cmdline"])["cmdline"] or () for child in children]
        servers = [child for child, line in zip(children, lines, strict=True) if own in " ".join(line)]
        assert servers
        for server in servers:
            with suppress(psutil.NoSuchProcess):  # it ends with its supervisor, which was killed before it
                server.kill()
        psutil.wait_procs(servers, timeout=5)
        raise ConnectionResetError("the connection was reset")


@pytest.fixture(autouse=True)
def _keep_signals(tiny_engine: TinyEngine) -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("harness", "error", "message"),
    [
        (Mistaken(), EvaluationError, "Exact could not run sums: KeyError: 'tset'"),
        (Unlucky(), TransientError, "the Tiny server .* went away while it was asked"),
    ],
    ids=["mistaken", "unlucky"],
)
def test_only_a_server_that_was_up_can_have_gone_away(tmp_path: Path, monkeypatch, harness, error, message) -> None:
    monkeypatch.setitem(registry.HARNESSES, "exact", harness)
    model, tasks, work = tmp_path / "base" / "model", tmp_path / "tasks", tmp_path / "work"
    for file, content in model_files(1000).items():
        (model / file).parent.mkdir(parents=True, exist_ok=True)
        (model / file).write_bytes(content)
    tasks.mkdir()
    work.mkdir()
    (tasks / "sums.jsonl").write_text(json.dumps({"question": "1 + 2", "answer": "3"}) + "\n")
    tree = {"kind": "evaluate", "model": "base", "harness": "exact", "tasks": ["sums"], "task_folder": str(tasks)}

    with pytest.raises(error, match=message):
        run(
            EvaluateConfig.model_validate(tree),
            StageContext(work, "scores", "0" * 12, {"base": tmp_path / "base"}, {}, tmp_path / "cache"),
        )
