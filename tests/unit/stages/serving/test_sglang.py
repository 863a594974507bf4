"""SGLang's command contains our settings, SGLang's own parser accepts it, and errors are found in its log.

Expectations come from SGLang's source: none of its servers was run. Its parser is asked where the package is installed:
LIFECYCLE_SGLANG names its interpreter.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import ModelError, RecipeError, ResourceError
from stages.models.recorded import Predicted, RecordedDocument, differences
from stages.serving.backend import EngineAddress
from stages.serving.config import ServingConfig
from stages.serving.engine import LaunchSpec, parsed
from stages.serving.packaged import CHECK, PROGRAM, SGLANG, PackagedProgram

ADDRESS = EngineAddress(port=4321)
ENGINE = SGLANG
INSTALLED = PackagedProgram(ENGINE, Path("/env/bin/python"), "0.5.23")
EVERYTHING: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 7,
    "tensor_parallel_size": 2,
    "dtype": "float16",
    "enforce_eager": True,
    "trust_remote_code": True,
    "arguments": {"chunked-prefill-size": 2048, "disable-radix-cache": True, "schedule-policy": "lpm"},
}
DIED = """[2026-11-23 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 9, in run_scheduler_process
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.5
[2026-11-23 10:00:01] Received sigquit from a child process.
RuntimeError: Rank 0 scheduler died during initialization (exit code: -3).
"""


@pytest.fixture
def command(tmp_path: Path):
    def made(stored: str = "bfloat16", **serving: Any) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({"dtype": stored}))
        config = ServingConfig.model_validate({"engine": "sglang", **serving})
        spec = LaunchSpec(model=tmp_path, served_name="m", serving=config, engine="sglang", engine_version="0.5.23")
        assert INSTALLED.server_environment(spec, "sk-secret")["SGLANG_SERVER_KEY"] == "sk-secret"
        return INSTALLED.server_command(spec, ADDRESS)

    return made


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_everything_the_recipe_says_reaches_the_command(command, tmp_path: Path) -> None:
    made = command(**EVERYTHING)

    assert made[:2] == ["/env/bin/python", "-P"] and made[2].endswith("serving/packaged_program.py")
    given = {"--model-path": str(tmp_path), "--served-model-name": "m", "--host": "127.0.0.1", "--port": "4321"}
    given |= {"--dtype": "float16", "--tp-size": "2", "--context-length": "512", "--max-running-requests": "7"}
    assert {name: option(made, name) for name in given} == given
    assert {"--trust-remote-code", "--cuda-graph-backend-decode=disabled", "--disable-radix-cache"} <= set(made)
    assert {"--chunked-prefill-size=2048", "--schedule-policy=lpm"} <= set(made)
    assert "sk-secret" not in " ".join(made)
    assert option(made, "--log-level") == "warning", "at `info` it logs its settings, and its key"
    assert option(made, "--load-format") == "safetensors"


def test_what_the_recipe_leaves_out_is_not_said(command) -> None:
    made = command()

    assert not {"--trust-remote-code", "--context-length", "--max-running-requests"} & set(made)
    assert (option(made, "--dtype"), option(command("float32"), "--dtype")) == ("auto", "bfloat16")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("load-format", "pt", "no option that is passed on"),
        ("api-key", "sk-1", "no option that is passed on"),
        ("forward-hooks", [{}], "no option that is passed on"),
        ("schedule-polic", "lpm", "did you mean schedule-policy"),
        ("disable-radix-cache", False, "leave the option out"),
    ],
)
def test_options_that_are_not_listed_are_refused(name: str, value: Any, said: str) -> None:
    (refused,) = ENGINE.refusals({name: value})

    assert refused.startswith(f"{name}: ") and said in refused
    with pytest.raises(RecipeError, match=said):
        ENGINE.written({name: value})


def test_its_own_parser_takes_the_command(command) -> None:
    try:
        program = ENGINE.find_program()
    except ResourceError as error:
        pytest.skip(str(error))
    options = command(**EVERYTHING)[4:]
    whole = {"everything": options, **{name: [f"--{name}"] for name in ENGINE.passed}}

    found = parsed((program.command, "-P", PROGRAM, ENGINE.name, CHECK), json.dumps(whole))

    assert found is not None, f"{program.command} {PROGRAM} did not end well"
    assert not [one for one in found if one.startswith("everything") or "unrecognized arguments" in one]


def test_the_cause_comes_with_what_to_change() -> None:
    found = ENGINE.root_cause(DIED) or ""

    assert found.startswith("RuntimeError: Not enough memory.")
    assert "raise serving.arguments.mem-fraction-static" in found
    assert ENGINE.root_cause("packaged_program.py: error: argument --tp-size: invalid int value: 'x'") == (
        "argument --tp-size: invalid int value: 'x'"
    )
    assert ENGINE.root_cause("[2026-11-23 10:00:01] Received sigquit from a child process.") is None
    below = "ImportError: \nAutoImageProcessor requires the Torchvision library\nPlease note"
    assert ENGINE.root_cause(below) == "ImportError: AutoImageProcessor requires the Torchvision library"


def test_what_it_is_not_known_to_do_is_not_promised() -> None:
    assert ENGINE.capabilities.prompt_log_probabilities
    assert not ENGINE.capabilities.adapters and not ENGINE.capabilities.new_weights
    with pytest.raises(ModelError, match="SGLang loads its weights once"):
        ENGINE.prepare_reloads(Path("model"))
    with pytest.raises(RecipeError, match="serving with SGLang in Kubernetes"):
        ENGINE.program_in_image(on_cpu=False)


def test_a_server_that_tells_no_ids_is_compared_by_log_probabilities_alone() -> None:
    document = RecordedDocument([1, 2, 3], [2, 3, -1], -3.0, [-1.0, -2.0], [2, 9])

    with_ids, without = (differences([Predicted([-1.0, -2.5], greedy)], [document]) for greedy in ([2, 9], ()))

    assert with_ids.same_greedy == 1 and without.same_greedy is None
    assert without.kl == with_ids.kl and without.mean == with_ids.mean == pytest.approx(0.25)
