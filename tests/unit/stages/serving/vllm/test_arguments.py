"""Extra vLLM options in a recipe are checked against a list of refused ones, and by vLLM's own parser."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import RecipeError
from stages.kinds.serve.config import ServeConfig
from stages.serving import engine
from stages.serving.backend import EngineAddress
from stages.serving.config import ServingConfig
from stages.serving.engine import LaunchSpec, UncheckedOptions, parsed
from stages.serving.registry import ENGINES
from stages.serving.vllm import arguments
from stages.serving.vllm.arguments import argument_problems, refusals, written
from stages.serving.vllm.engine import VllmProgram, find_vllm

ON_CPU = VllmProgram(Path("/env/bin/vllm"), Path("/env/bin/python"), "0.32.0+cpu")
GOOD: dict[str, Any] = {
    "enable-prefix-caching": False,
    "max-num-batched-tokens": 2048,
    "kv-cache-dtype-skip-layers": ["0", "1"],
    "override-generation-config": {"top_k": 1},
    "disable-log-stats": True,
}
WRONG = {
    "tool-call-parsr": ("hermes", "vLLM has no such option; did you mean tool-call-parser"),
    "scheduling-policy": ("lottery", "invalid choice: 'lottery' (choose from 'fcfs', 'priority')"),
    "block-size": ("many", "invalid int value: 'many'"),
}


def command(given: dict[str, Any]) -> list[str]:
    serving = ServingConfig.model_validate({"arguments": given})
    spec = LaunchSpec(model=Path("/models/m"), served_name="m", serving=serving, engine_version="0.32.0")
    return ON_CPU.server_command(spec, EngineAddress(Path("engine.sock")))


def test_each_kind_of_value_reaches_the_command() -> None:
    made = command(GOOD)

    assert {"--no-enable-prefix-caching", "--max-num-batched-tokens=2048", "--disable-log-stats"} <= set(made)
    assert made[made.index("--kv-cache-dtype-skip-layers") :][1:3] == ["0", "1"]
    assert '--override-generation-config={"top_k": 1}' in made


def test_names_may_be_written_with_underscores_and_are_the_same_version() -> None:
    one, other = (
        ServeConfig.model_validate({"kind": "serve", "model": "sft", "serving": {"arguments": {name: 16}}})
        for name in ("block-size", "--block_size")
    )
    unset = ServeConfig.model_validate({"kind": "serve", "model": "sft"})

    assert one.identity() == other.identity() != unset.identity()
    assert "arguments" not in unset.identity()["serving"]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("port", 80, "say execution.port"),
        ("dtype", "float32", "say serving.dtype"),
        ("limit-mm-per-prompt", {"image": 99}, "say serving.max_images"),
        ("mm-processor-kwargs", {"max_pixels": 1}, "the model is what its folder holds"),
        ("lora-modules", ["a=b"], "name adapters as stages"),
        ("api-key", "sk-1", "a door past the proxy"),
        ("api-k", "sk-1", "a door past the proxy"),
        ("trust-remote", True, "say serving.trust_remote_code"),
        ("middleware", "os.system", "a door past the proxy"),
        ("allowed-local-media-path", "/", "a door past the proxy"),
        ("config", "own.yaml", "a door past the proxy"),
        ("worker-extension-cls", "own.Worker", "run code of others"),
        ("logits-processors", ["own:Processor"], "run code of others"),
        ("load-format", "pt", "no safetensors"),
        ("chat-template", "own.jinja", "in no version"),
        (
            "speculative-config",
            {"method": "ngram"},
            "say `speculative` in the serve stage: ngram, mtp, or {draft: STAGE}",
        ),
        ("speculative-conf", {"method": "mtp"}, "say `speculative` in the serve stage"),
        ("spec-model", "org/draft", "say `speculative` in the serve stage"),
        ("observability-config", {"method": "custom_class"}, "custom_class names what is in no version"),
        ("observability-config", {"model": "org/draft"}, "model names what is in no version"),
        ("structured-outputs-config", {"reasoning_parser_plugin": "own.py"}, "reasoning_parser_plugin names what"),
        ("compilation-config", '{"backend": "os.system"}', "backend names what is in no version"),
        ("compilation-config", {"inductor_passes": {"a": "own.f"}}, "inductor_passes names what is in no version"),
        ("observability-config", [{"deep": {"debug_dump_path": "/"}}], "debug_dump_path names what is in no version"),
        ("kv-cache-dtype-skip-layers", ["0", "--api-key=x"], "items that begin with no dash"),
        ("compilation-config.mode", 3, "expected an option's name"),
        ("no-enforce-eager", True, "expected an option's name"),
        ("block-size", None, "has no value"),
    ],
)
def test_what_opens_doors_or_is_said_elsewhere_is_refused_by_name(name: str, value: Any, why: str) -> None:
    (refused,) = refusals({name: value})

    assert refused.startswith(f"{name}: ") and why in refused
    with pytest.raises(RecipeError, match=why):
        written({name: value})
    with pytest.raises(RecipeError):
        command({name: value})


def test_the_rest_is_asked_of_vllms_own_parser_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options that we do not refuse are checked by vLLM's own parser, whose answer is kept.

    It also knows every option on our list of refused ones: a typo in a name would let the option through.
    """
    refused = {name: [] for name in arguments.REFUSED}

    def ask_of_all(command: tuple[str | Path, ...], asked: str) -> list[str] | UncheckedOptions:
        # One start of vLLM's environment takes ten seconds of processor time.
        return parsed(command, json.dumps({**refused, **json.loads(asked)}))

    monkeypatch.setattr(engine, "parsed", ask_of_all)
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    program = find_vllm()
    given = {**GOOD, **{name: value for name, (value, _) in WRONG.items()}}

    found = argument_problems(program.python, program.version, given)

    assert isinstance(found, list)
    assert [problem.partition(":")[0] for problem in found] == sorted(WRONG)
    for name, (_, why) in WRONG.items():
        assert any(problem.startswith(f"{name}: ") and why in problem for problem in found)
    assert argument_problems(Path("/no/python"), program.version, given) == found, "kept by version"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("echo Traceback >&2; echo 'ImportError: no libcuda.so.1' >&2; exit 1", "ImportError: no libcuda.so.1"),
        ("exit 3", "exit status 3"),
        ("exec sleep 60", "no answer within 0.5 s"),
    ],
)
def test_a_vllm_that_cannot_be_asked_leaves_it_to_its_server_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, reason: str
) -> None:
    if "0.5 s" in reason:
        monkeypatch.setattr(engine, "PARSER_TIMEOUT_S", 0.5)
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    unable = tmp_path / "python"
    unable.write_text(f"#!/bin/sh\n{end}\n")
    unable.chmod(0o755)

    found = argument_problems(unable, "0.32.0", {"block-size": 16})

    assert isinstance(found, UncheckedOptions)
    assert f"was not checked: its parser does not run here ({reason}); its server says" in found.why
    assert not (tmp_path / "cache").exists()


def test_other_engines_take_none() -> None:
    assert "arguments" in ENGINES["llama_cpp"].capabilities.idle_fields
