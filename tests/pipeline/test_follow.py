"""A champion served by the real vLLM is replaced by its challenger under load, without a failed request."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from flows.champion.registrations import Registration
from flows.champion.registry import Registry
from flows.ledger.home import store_root
from flows.store.store import Store
from stages.adapters.headers import WEIGHTS_FILE, write_idle_adapter
from stages.serving.engine import LaunchSpec
from tests.promotion import NAME, commit, own_mlflow, planned_stages
from tests.served_adapters import adapted, greedy, make_adapter
from tests.serving import API_KEY, SERVING, engine_processes, is_port_free, kill, make_model, served_processes, wait_for

LIFECYCLE = Path(sys.executable).with_name("lifecycle")
QUESTION = {"model": NAME, "prompt": "What is 12 + 34?", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = {**QUESTION, "prompt": "What is 12 + 34? " * 9}
NUM_ASKERS = 3
NUM_USERS = 4
"""Number of users whose ids each client sends in turn. Requests of half of the users go to the challenger."""
PAUSE_S = 0.1
"""Pause in seconds between a client's requests, which leaves the starting server CPU time."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("following")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**own_mlflow(folder), "VLLM_API_KEY": API_KEY}.items():
            patch.setenv(name, value)
        yield folder


def registration(seed: int) -> Registration:
    """Store a tiny model and its serve stage as artifacts; return the model's `Registration` for the model registry."""
    serving = {"max_model_len": SERVING["max_model_len"], "enforce_eager": True}
    tree = {
        "model": {"kind": "download", "model": "builtin/qwen3-1m", "files": [str(seed)]},
        "serve": {"kind": "serve", "model": "model", "serving": serving},
    }
    store = Store(store_root())
    stages = planned_stages(store, tree)

    def write_launch(work: Path) -> None:
        launch = LaunchSpec(model=work, served_name="model", serving=SERVING, engine_version="any")
        (work / "launch.json").write_text(launch.model_dump_json())

    built = {"model": commit(store, stages["model"], {}, lambda work: make_model(work / "model", seed))}
    served = commit(store, stages["serve"], built, write_launch)
    model = built["model"]
    return Registration(
        name=NAME,
        model=f"{model.kind}/{model.version}",
        digest=model.record.digest,
        evaluations=(),
        server=f"{served.kind}/{served.version}",
    )


def make_champion(made: Registration) -> None:
    registry = Registry()
    before = registry.find(NAME)
    number = before.number if before else None
    registry.promote(registry.register(made, number), number)


@dataclass
class Load:
    """Clients that send completion requests continuously, half of them streamed, and keep answers and failures."""

    url: str
    question: dict[str, Any] = field(default_factory=lambda: QUESTION)
    answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    enough: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        number = 0
        while not self.enough.is_set():
            number += 1
            try:
                question = {**self.question, "user": f"user {number % NUM_USERS}"}
                self.answers.append((stream if number % 2 else complete)(self.url, question))
            except Exception as error:
                self.failures.append(repr(error))
            self.enough.wait(PAUSE_S)

    def more_answers(self, count: int) -> None:
        wanted = len(self.answers) + count
        wait_for(lambda: len(self.answers) >= wanted, what=f"{count} more answers")


def post(url: str, body: dict[str, Any], key: str = API_KEY) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120)


def complete(url: str, question: dict[str, Any] = QUESTION) -> str:
    with post(f"{url}/completions", question) as answer:
        return json.load(answer)["choices"][0]["text"]


def stream(url: str, question: dict[str, Any]) -> str:
    with post(f"{url}/completions", {**question, "stream": True}) as answer:
        lines = [line.removeprefix(b"data: ").strip() for line in answer if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def get(url: str) -> Any:
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {API_KEY}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


def versions_in(metrics: str) -> set[str]:
    """Return the model versions that label the samples in a server's vLLM metrics."""
    asked = urllib.request.Request(metrics, headers={"Authorization": f"Bearer {API_KEY}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        families = [*text_string_to_metric_families(answer.read().decode())]
    samples = [sample for family in families if family.name.startswith("vllm:") for sample in family.samples]
    assert {sample.labels["lifecycle_model"] for sample in samples} == {NAME}
    return {sample.labels["lifecycle_version"] for sample in samples}


def test_a_new_champion_takes_over_without_a_failed_request(environment: Path) -> None:
    make_champion(registration(seed=0))
    command = [LIFECYCLE, "serve", f"models:/{NAME}@champion", "--follow", "--canary", "50%"]
    with subprocess.Popen(command, env=os.environ.copy(), text=True, stdout=subprocess.PIPE) as process:
        try:
            lines: list[str] = []
            url = next(line.split(" at ")[1].strip() for line in process.stdout if line.startswith("serving "))
            threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True).start()
            with pytest.raises(urllib.error.HTTPError, match="401"):
                post(f"{url}/completions", QUESTION, key="another")
            load = Load(url)
            askers = [threading.Thread(target=load.ask) for _ in range(NUM_ASKERS)]
            for asker in askers:
                asker.start()
            load.more_answers(10)
            registry = Registry()
            registry.challenge(registry.register(registration(seed=1)))
            wait_for(lambda: any("gets 50.0% of the requests" in line for line in lines), what="the challenger")
            load.more_answers(10)
            versions = versions_in(f"{url.removesuffix('/v1')}/metrics")
            registry.promote_challenger(NAME)
            wait_for(lambda: any("version 1" in line and "was stopped" in line for line in lines), what="the exchange")
            former = len(load.answers)
            load.more_answers(10)
            load.enough.set()
            for asker in askers:
                asker.join()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(300)
    assert load.failures == []
    assert process.returncode == 0
    assert versions == {"1", "2"}
    assert sum("starting vLLM" in line for line in lines) == 1  # of the challenger, which goes on as champion
    first, last = load.answers[0], load.answers[-1]
    assert first != last
    assert set(load.answers) == {first, last}
    assert set(load.answers[former + NUM_ASKERS :]) == {last}
    assert is_port_free(url.removesuffix("/v1"))
    assert not served_processes(environment)


@pytest.mark.nightly
def test_a_champion_is_served_as_it_is_for_whoever_does_not_follow(environment: Path) -> None:
    """Without `--follow`, `lifecycle serve` serves the champion of its start until it is interrupted.

    `make test`: `test_llama_cpp.py` (an artifact is served) and `test_supervised_serving.py` (a champion is served).
    """
    make_champion(registration(seed=2))
    command = [LIFECYCLE, "serve", f"models:/{NAME}@champion"]
    with subprocess.Popen(command, env=os.environ.copy(), text=True, stdout=subprocess.PIPE) as process:
        try:
            url = next(line.split(" at ")[1].strip() for line in process.stdout if line.startswith("serving "))
            assert complete(url)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                post(f"{url}/completions", QUESTION, key="another")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(300)
    assert process.returncode == 0
    assert is_port_free(url.removesuffix("/v1"))
    assert not served_processes(environment)


def adapter_registration(seed: int) -> Registration:
    """Store an adapter of the tiny model (seed 0) and its serve stage; return its `Registration` for the registry."""
    training = {"kind": "train", "method": "sft", "adapter": {}, "seed": seed}
    tree = {
        "model": {"kind": "download", "model": "builtin/qwen3-1m", "files": ["0"]},
        "rows": {"kind": "download", "dataset": "builtin/addition"},
        "tuned": {
            **training,
            "model": "model",
            "data": {"dataset": "rows"},
            "global_batch_size": 8,
            "learning_rate": 1,
        },
        "serve": {"kind": "serve", "model": "tuned", "serving": {"enforce_eager": True}},
    }
    store = Store(store_root())
    stages = planned_stages(store, tree)
    built = {"model": commit(store, stages["model"], {}, lambda work: make_model(work / "model"))}
    built["rows"] = commit(store, stages["rows"], {}, lambda work: (work / "data").mkdir())
    base = built["model"].artifact / "model"
    built["tuned"] = commit(store, stages["tuned"], built, lambda work: make_adapter(base, work, seed=seed))

    def write_launch(work: Path) -> None:
        launch = LaunchSpec(model=base, served_name="tuned", serving=SERVING, engine_version="any")
        (work / "launch.json").write_text(launch.model_dump_json())

    served = commit(store, stages["serve"], built, write_launch)
    adapter = built["tuned"]
    return Registration(
        name=NAME,
        model=f"{adapter.kind}/{adapter.version}",
        digest=adapter.record.digest,
        evaluations=(),
        base=f"{built['model'].kind}/{built['model'].version}",
        server=f"{served.kind}/{served.version}",
    )


def lose(made: Registration, folder: Path) -> None:
    """Replace a stored adapter's weights by weights without effect, as if the trained ones were lost."""
    adapter = Store(store_root()).find(*made.model.split("/")).folder / "adapter"
    write_idle_adapter(adapter, folder / "lost")
    shutil.copyfile(folder / "lost" / WEIGHTS_FILE, adapter / WEIGHTS_FILE)


def expected_answer(made: Registration) -> str:
    """Return the answer that an adapter must give to the test's question, computed with PEFT."""
    store = Store(store_root())
    base, adapter = (store.find(*key.split("/")).folder for key in (made.base, made.model))
    tokenizer = AutoTokenizer.from_pretrained(base / "model")
    answer = greedy(adapted(base / "model", adapter), tokenizer(LONG["prompt"]).input_ids, LONG["max_tokens"])
    return tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.nightly
def test_adapters_take_over_in_the_running_server_without_a_failed_request(environment: Path) -> None:
    """Adapters replace each other in the running vLLM without a failed request.

    More adapters than the server can hold; the prompt is long enough to hit a stale prefix cache. The first one
    challenges before it takes over: each of the two answers its users. One that was lost on its way is not taken over.
    When the engine dies while it loads the next, it is started again, and loads that.

    `make test`: whole models take over (above), and several adapters answer in one vLLM (`test_serve_adapters.py`).
    """
    adapters = [adapter_registration(seed) for seed in range(6)]
    lose(adapters[5], environment)
    make_champion(adapters[0])
    command = [LIFECYCLE, "serve", f"models:/{NAME}@champion", "--follow", "--canary", "50%"]
    with subprocess.Popen(command, env=os.environ.copy(), text=True, stdout=subprocess.PIPE) as process:
        try:
            lines: list[str] = []
            url = next(line.split(" at ")[1].strip() for line in process.stdout if line.startswith("serving "))
            threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True).start()
            load = Load(url, LONG)
            askers = [threading.Thread(target=load.ask) for _ in range(NUM_ASKERS)]
            for asker in askers:
                asker.start()
            load.more_answers(6)
            registry = Registry()
            challenger = registry.register(adapters[1])
            registry.challenge(challenger)
            wait_for(lambda: any("gets 50.0% of the requests" in line for line in lines), what="the challenger")
            load.more_answers(NUM_ASKERS * (NUM_USERS + 1))
            beside = get(f"{url.removesuffix('/v1')}/versions")
            engine_versions = versions_in(f"{url.removesuffix('/v1')}/metrics")
            registry.promote_challenger(NAME)
            wait_for(lambda: any("was stopped" in line for line in lines), what="the end of the canary")
            for made in adapters[2:4]:
                load.more_answers(6)
                num_swaps = sum("was stopped" in line for line in lines)
                make_champion(made)
                wait_for(lambda num=num_swaps: sum("was stopped" in line for line in lines) > num, what="the exchange")
            former = len(load.answers)
            make_champion(adapters[5])
            wait_for(
                lambda: any("still serving" in line and "does nothing" in line for line in lines), what="a refusal"
            )
            load.more_answers(6)
            load.enough.set()
            for asker in askers:
                asker.join()
            with pytest.raises(urllib.error.HTTPError, match="404"):
                post(f"{url}/completions", {**LONG, "model": f"{NAME}-base"})
            assert [one["id"] for one in get(f"{url}/models")["data"]] == [NAME]

            engines = engine_processes(environment)
            for engine in engines:
                os.kill(engine, signal.SIGSTOP)
            make_champion(adapters[4])
            wait_for(lambda: sum("is champion now" in line for line in lines) == 5, what="the next exchange")
            time.sleep(1.0)  # the engine is asked to load it by then
            kill(engines)
            while_none_answers = complete(url, LONG)
            served = f"version {registry.find(NAME).number} of adder is served"
            wait_for(lambda: any(served in line for line in lines), what="the adapter that was being loaded")
            answer_of_the_next = complete(url, LONG)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(300)
    assert load.failures == []
    assert sum("starting vLLM" in line for line in lines) == 1  # after its death
    both = [beside["champion"], beside["challenger"]]
    assert both[1] == challenger.number
    assert engine_versions == {",".join(both)}, "one engine counts for the two"
    counted = {one["version"]: one for one in beside["versions"]}
    assert [counted[version]["errors"] for version in both] == [0, 0]
    assert min(counted[version]["requests"] for version in both) >= NUM_ASKERS
    swapped_s = [float(line.split(" checked in ")[1].split()[0]) for line in lines if " checked in " in line]
    assert len(swapped_s) == 4
    assert max(swapped_s) < 10  # 0.3 s on a quiet machine
    *expected, expected_of_the_next = [expected_answer(made) for made in adapters[:5]]
    assert while_none_answers in (expected[3], expected_of_the_next)
    assert answer_of_the_next == expected_of_the_next
    assert list(dict.fromkeys(load.answers)) == expected
    assert set(load.answers[former + NUM_ASKERS :]) == {expected[3]}
    assert not served_processes(environment)
