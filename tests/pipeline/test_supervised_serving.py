"""`lifecycle serve --follow` restarts killed engines, and ends with one message when the user made a mistake."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from flows.champion.registrations import Registration
from flows.champion.registry import Registry
from flows.ledger.home import home
from stages.core.process_tree import descendants
from stages.serving.server import listening_socket
from tests.followed import KEY, ask, registration, tiny_registry
from tests.promotion import NAME, ROOT
from tests.serving import wait_for

LIFECYCLE = Path(sys.executable).with_name("lifecycle")
WITH_TINY = """
import sys
if "serve" in sys.orig_argv:
    from stages.serving import registry
    from tests.tiny_engine import TinyEngine
    registry.ENGINES["tiny"], registry.DEFAULT_ENGINE = TinyEngine(), "tiny"
"""
"""Python start-up code (`sitecustomize`) that makes `lifecycle serve` use the tiny engine of the tests."""


@pytest.fixture
def registry(tmp_path, monkeypatch) -> Registry:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITH_TINY)
    found = tiny_registry(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{ROOT}")
    return found


@contextmanager
def serving(*options: str) -> Iterator[subprocess.Popen[str]]:
    command = [LIFECYCLE, "serve", f"models:/{NAME}@champion", "--follow", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ.copy(), text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_serves_is_started_again_with_the_same_socket_and_key_when_it_is_killed(registry):
    registry.promote(registry.register(registration("first")), None)
    with serving() as process:
        url = next(line.split(" at ")[1].strip() for line in process.stdout if line.startswith("serving "))
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url.removesuffix("/v1"), headers=headers, timeout=300) as client:
            assert ask(client, 2) == "1"
        before = descendants(process.pid)
        serves = next(pid for pid in before if b"--descriptor" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(serves, signal.SIGKILL)
        with httpx.Client(base_url=url.removesuffix("/v1"), headers=headers, timeout=300) as client:
            assert ask(client, 4) == "1"

        def are_others() -> list[int] | None:
            after = descendants(process.pid)
            return after if len(after) == len(before) and not {*after} & {*before} else None

        after = wait_for(are_others, what="as many processes as before")
        assert len([*(home() / "servers").glob("serving-*/")]) == 1
        process.terminate()
        assert process.wait(300) == 0
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in after), what="the end of them")
        assert [*(home() / "servers").glob("serving-*/")] == []


def test_a_mistake_ends_it_with_one_message(registry):
    def ended(*options: str) -> tuple[int, str]:
        with serving(*options) as process:
            said, wrong = process.communicate(timeout=300)
        assert "Traceback" not in said + wrong
        assert "started again" not in said
        return process.returncode, wrong

    code, wrong = ended()
    assert (code, "has no champion of adder" in wrong) == (12, True)
    registry.promote(registry.register(Registration(name=NAME, model="train/b", digest="b", evaluations=())), None)
    with listening_socket("127.0.0.1", None) as taken:
        code, wrong = ended("--port", str(taken.getsockname()[1]))
        assert (code, "cannot listen on" in wrong) == (8, True)
    code, wrong = ended()
    assert (code, "which is not in the store" in wrong) == (12, True)
    assert wrong.count("not in the store") == 1
