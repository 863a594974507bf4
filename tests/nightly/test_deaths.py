"""A nightly refresh in which a training rank and vLLM's engine are killed ends with the same results as without.

In `make test`: `test_deaths.py` and `test_serve_faults.py` of `tests/faults`, `tests/pipeline/test_refresh.py`.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
from refreshes import ROOT, Home, eventually, states

from stages.core.process_tree import living_processes
from tests.serving import SERVING

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
STEPS, SAVE_EVERY = 24, 4


def recipe(home):
    data = {"dataset": "rows", "sequence_length": 64}
    layout = {"dp_shard": 2, "micro_batch_size": 2}
    execution = {"threads": 1, "checkpoint_every_steps": SAVE_EVERY, "measure_matmul_rate": False}
    sft = {"kind": "train", "method": "sft", "model": "base", "data": data, "layout": layout, "execution": execution}
    sft |= {"steps": STEPS, "global_batch_size": 4, "learning_rate": 1e-3, "precision": "fp32"}
    scores = {"kind": "evaluate", "model": "serve", "tasks": ["addition"], "limit": 100, "apply_chat_template": True}
    scores |= {"task_folder": str(ROOT / "configs" / "tasks"), "execution": {"concurrent_requests": 1}}
    return home.recipe(
        "night",
        base={"kind": "download", "model": "builtin/qwen3-1m"},
        rows={"kind": "download", "dataset": "builtin/addition"},
        sft=sft,
        serve={"kind": "serve", "model": "sft", "serving": SERVING, "benchmark": None},
        scores=scores,
    )


@pytest.fixture
def nights(tmp_path):
    """Provide two lifecycle homes for the same nightly refresh: processes are killed in one, not in the other."""
    homes = [Home(tmp_path / name / "home") for name in ("disturbed", "undisturbed")]
    for home in homes:
        home.folder.mkdir(parents=True)
    yield homes
    for home in homes:
        home.lifecycle("down")


def kill(home, *signs):
    """Kill all processes of a lifecycle home whose arguments and environment contain all the given texts."""
    found = []
    for pid in living_processes():
        with suppress(OSError):
            files = [Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0") for file in ("environ", "cmdline")]
            texts = {text.decode(errors="replace") for texts in files for text in texts}
            if any(str(home.folder) in text for text in texts) and texts.issuperset(signs):
                found.append(pid)
    assert found, f"no process has {signs}"
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def weights(home):
    (artifact,) = (home.folder / "store" / "train").iterdir()
    return (artifact / "model" / "model.safetensors").read_bytes()


def test_a_night_of_deaths_ends_as_an_undisturbed_one_does(nights):
    disturbed, undisturbed = nights
    assert undisturbed.lifecycle("run", str(recipe(undisturbed)), "--json").returncode == 0

    night = disturbed.lifecycle_beside("run", str(recipe(disturbed)), "--json")
    disturbed.work("sft", f"scratch/checkpoints/step-{SAVE_EVERY}")
    kill(disturbed, "RANK=1")
    events = disturbed.work("scores", "events.jsonl")
    eventually(lambda: any(json.loads(line).get("done") for line in events.read_text().splitlines()))
    kill(disturbed, "VLLM::EngineCore")
    output, said = night.communicate()
    assert night.returncode == 0, said

    refresh = json.loads(output)
    assert set(states(refresh).values()) == {"built"}
    assert weights(disturbed) == weights(undisturbed)
    killed = [line for line in said.splitlines() if "tried again" in line]
    assert any("rank 1 was killed by SIGKILL" in line for line in killed), said
    assert [run["info"]["status"] for run in disturbed.attempts("sft")] == ["KILLED", "FINISHED"]
    assert disturbed.processes() == []
