"""vLLM's command and environment have the recipe's settings, on CPU and GPU; the API key is never in argv."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import trl

from stages.core.errors import ModelError
from stages.models import call_formats
from stages.models.media import HeardSound
from stages.serving.backend import EngineAddress
from stages.serving.config import ServingConfig, Speculation
from stages.serving.engine import LaunchSpec
from stages.serving.registry import ENGINES, check_sees
from stages.serving.vllm.engine import FORKING, VllmProgram, find_vllm
from stages.serving.vllm.tool_parsers import known_parsers, parser_problem

SOCKET = EngineAddress(Path("engine.sock"))
ON_CPU = VllmProgram(Path("/env/bin/vllm"), Path("/env/bin/python"), "0.32.0+cpu")
ON_GPU = VllmProgram(Path("/env/bin/vllm"), Path("/env/bin/python"), "0.32.0")


def spec(**serving: object) -> LaunchSpec:
    config = ServingConfig.model_validate(serving)
    return LaunchSpec(model=Path("/models/m"), served_name="m", serving=config, engine_version="0.32.0")


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_everything_the_recipe_says_reaches_the_command() -> None:
    launch = spec(
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=7,
        tensor_parallel_size=2,
        kv_cache_memory_gib=0.5,
        enforce_eager=True,
        trust_remote_code=True,
    )

    command = ON_GPU.server_command(launch, SOCKET)

    assert command[:3] == ["/env/bin/vllm", "serve", "/models/m"]
    assert option(command, "--dtype") == "bfloat16"
    assert option(command, "--max-model-len") == "512"
    assert option(command, "--max-num-seqs") == "7"
    assert option(command, "--tensor-parallel-size") == "2"
    assert option(command, "--kv-cache-memory-bytes") == str(2**29)
    assert {"--enforce-eager", "--trust-remote-code"} <= set(command)


def test_nothing_is_said_that_the_recipe_does_not_say() -> None:
    command = ON_GPU.server_command(spec(), SOCKET)

    assert not {"--trust-remote-code", "--enforce-eager", "--max-model-len", "--kv-cache-memory-bytes"} & set(command)


def test_a_model_that_sees_gets_pictures_of_its_requests_alone(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    seeing = spec(max_images=2).model_copy(update={"model": tmp_path})
    command = ON_CPU.server_command(seeing, SOCKET)

    assert spec(max_images=2).max_images == 0
    assert json.loads(option(command, "--limit-mm-per-prompt")) == {"image": 2, "video": 0, "audio": 0}
    assert option(command, "--allowed-media-domains") == "none.invalid"
    assert ON_CPU.server_environment(seeing, "key")["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    own = {"video_processor_type": "Qwen3VLVideoProcessor", "fps": 2.5, "max_frames": None}
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"video_processor": own, "feature_extractor": {"sampling_rate": 8000}})
    )
    (tmp_path / "trained_on.json").write_text('{"conversations": true, "media": ["audio", "video"]}')
    learned = spec(max_images=2).model_copy(update={"model": tmp_path})
    command = ON_CPU.server_command(learned, SOCKET)
    assert learned.limits.taken["audio"] == HeardSound(8000, 300)
    assert json.loads(option(command, "--limit-mm-per-prompt")) == {"image": 2, "video": 2, "audio": 2}
    assert json.loads(option(command, "--media-io-kwargs")) == {
        "video": {"fps": 2.5, "min_frames": 4, "max_frames": 768}
    }
    assert "--no-mm-device-do-normalize" in command
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"video_processor": own | {"video_processor_type": "Qwen2VLVideoProcessor"}})
    )
    other = spec(max_images=2).model_copy(update={"model": tmp_path})
    assert other.limits.kinds == {"image"} and "Qwen2.5-VL otherwise" in other.limits.reasons["video"]
    assert not {"--limit-mm-per-prompt", "--enable-scale-out"} & set(ON_CPU.server_command(spec(), SOCKET))
    for name, engine in ENGINES.items():
        with nullcontext() if name == "vllm" else pytest.raises(ModelError, match="serve it with vLLM"):
            check_sees(tmp_path, engine)
    (tmp_path / "adapter").mkdir()
    own = tmp_path / "adapter" / "preprocessor_config.json"
    own.write_text("{ }")
    check_sees(tmp_path, ENGINES["vllm"], {"tuned": own.parent})
    own.write_text('{"max_pixels": 1}')
    with pytest.raises(ModelError, match=r"adapter tuned .* such as other bounds of pixels"):
        check_sees(tmp_path, ENGINES["vllm"], {"tuned": own.parent})


def test_a_trial_compiles_nothing_on_a_cpu() -> None:
    tried = spec().model_copy(update={"num_tried": 1})
    served = ON_CPU.server_command(spec(enforce_eager=False), SOCKET)

    assert "--enforce-eager" in ON_CPU.server_command(tried, SOCKET)
    assert ON_CPU.server_environment(tried, "key")["TORCHDYNAMO_DISABLE"] == "1"
    assert "--enforce-eager" not in {*ON_GPU.server_command(tried, SOCKET), *served}


def test_trials_side_by_side_share_a_gpu() -> None:
    tried = [spec().model_copy(update={"num_tried": number}) for number in (1, 2)]
    alone, beside = (ON_GPU.server_command(one, SOCKET) for one in tried)

    assert option(beside, "--gpu-memory-utilization") == "0.45"
    assert "--gpu-memory-utilization" not in {*alone, *ON_CPU.server_command(tried[1], SOCKET)}


def test_a_server_on_a_cpu_leaves_memory_to_others() -> None:
    command = ON_CPU.server_command(spec(), SOCKET)

    assert option(command, "--kv-cache-memory-bytes") == str(4 * 2**30)


def test_a_single_worker_on_a_cpu_lives_in_the_engine() -> None:
    assert "uni" in ON_CPU.server_command(spec(), SOCKET)
    assert "uni" not in ON_CPU.server_command(spec(tensor_parallel_size=2), SOCKET)
    assert "uni" not in ON_GPU.server_command(spec(), SOCKET)


def test_an_eager_engine_is_forked_on_this_machines_cpu_only() -> None:
    eager, compiled = spec(enforce_eager=True), spec()
    in_image = VllmProgram(Path("vllm"), Path("python"), "image+cpu")

    assert ON_CPU.server_command(eager, SOCKET)[:4] == ["/env/bin/python", "-P", str(FORKING), "serve"]
    assert ON_CPU.server_command(compiled, SOCKET)[:2] == ["/env/bin/vllm", "serve"]
    assert ON_GPU.server_command(eager, SOCKET)[:2] == ["/env/bin/vllm", "serve"]
    assert in_image.server_command(eager, SOCKET)[:2] == ["vllm", "serve"]


def test_settings_for_cpus_stay_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)

    eager_on_cpu = ON_CPU.server_environment(spec(enforce_eager=True), "key")
    compiled_on_cpu = ON_CPU.server_environment(spec(), "key")
    eager_on_gpu = ON_GPU.server_environment(spec(enforce_eager=True), "key")

    assert eager_on_cpu["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in compiled_on_cpu
    assert not {"TORCHDYNAMO_DISABLE", "OMP_WAIT_POLICY", "VLLM_ENABLE_V1_MULTIPROCESSING"} & set(eager_on_gpu)


@pytest.mark.parametrize("program", [ON_CPU, ON_GPU])
def test_a_server_listens_on_its_socket_and_its_processes_on_the_loopback(program: VllmProgram, monkeypatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    command, environment = program.server_command(spec(), SOCKET), program.server_environment(spec(), "key")

    assert option(command, "--uds") == "engine.sock"
    assert not {"--host", "--port"} & set(command)
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert {environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]} == {"lo"}


def test_the_key_travels_in_the_environment_only() -> None:
    command = ON_CPU.server_command(spec(), SOCKET)

    assert ON_CPU.server_environment(spec(), "sk-secret")["VLLM_API_KEY"] == "sk-secret"
    assert "--api-key" not in command
    assert "key" not in spec().model_dump_json()


def test_a_launch_spec_comes_back_from_its_file() -> None:
    launch = spec(dtype="float32", max_model_len=64)

    assert LaunchSpec.model_validate_json(launch.model_dump_json(indent=2)) == launch


def test_a_launch_spec_of_before_there_were_engines_is_vllms() -> None:
    tree = spec(dtype="float32").model_dump(mode="json")
    del tree["engine"], tree["engine_version"]

    assert LaunchSpec.model_validate({**tree, "vllm_version": "0.32.0"}) == spec(dtype="float32")


def test_adapters_are_loaded_at_run_time_only_into_a_server_that_is_to_swap_them(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    swapping = spec().model_copy(update={"swaps_adapters": True})

    assert ON_CPU.server_environment(spec(), "key")["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    assert ON_CPU.server_environment(swapping, "key")["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_weights_are_reloaded_only_into_a_server_that_samples_for_training(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("RANK", "0")
    sampling = spec().model_copy(update={"for_training": True})

    assert ON_CPU.server_environment(spec(), "key")["VLLM_SERVER_DEV_MODE"] == "0"
    assert ON_CPU.server_environment(sampling, "key")["VLLM_SERVER_DEV_MODE"] == "1"
    assert "RANK" not in ON_CPU.server_environment(sampling, "key"), "it is no process of the training's group"
    assert option(ON_CPU.server_command(sampling, SOCKET), "--generation-config") == "vllm"
    assert "--generation-config" not in ON_CPU.server_command(spec(), SOCKET)


TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOKENS = {
    "mistral": ["[TOOL_CALLS]"],
    "llama3": ["<|python_tag|>"],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>"],
}
DEEPSEEK = [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end")]


def parser(folder: Path, template: str | list[dict[str, str]], tokens: list[str], **serving: object) -> str | None:
    """Return the tool-call parser that vLLM is started with for a chat template and these special tokens."""
    added = [{"content": token, "id": number} for number, token in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"a": 99}}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    command = ON_CPU.server_command(spec(**serving).model_copy(update={"model": folder}), SOCKET)
    assert ("--enable-auto-tool-choice" in command) == ("--tool-call-parser" in command)
    return option(command, "--tool-call-parser") if "--tool-call-parser" in command else None


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        *((f"{name}.jinja", [], "hermes") for name in ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl")),
        *((f"{name}.jinja", [], "qwen3_coder") for name in ("qwen3_6", "qwen3_5_think", "nemotron_3_nano")),
        ("glm4moe.jinja", [], "glm45"),
        ("gemma4.jinja", [], "gemma4"),
        ("gptoss.jinja", [], "openai"),
        ("muse_glimmer.jinja", [], "muse_glimmer"),
        *((f"{name}.jinja", TOKENS["lfm2"], "lfm2") for name in ("lfm2", "lfm2_2_5", "lfm2_v2")),
        *((f"{name}.jinja", TOKENS["llama3"], "llama3_json") for name in ("llama3_1", "llama3_2")),
        ("llama3_1.jinja", [], None),
        ("deepseekv3.jinja", DEEPSEEK, "deepseek_v3"),
        ("deepseekv3.jinja", DEEPSEEK[:3], None),
        *((f"{name}.jinja", [], None) for name in ("phi3", "gemma3", "llama3", "cohere", "smolvlm")),
        ("{{ '[TOOL_CALLS] [' + calls }}", TOKENS["mistral"], "mistral"),
        ("{{ '[TOOL_CALLS] [' + calls }}", [], None),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", DEEPSEEK, "deepseek_v31"),
        ([{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "<tool_call>"}], [], "hermes"),
    ],
)
def test_the_chat_template_names_the_parser_of_calls(template, tokens, expected, tmp_path) -> None:
    if isinstance(template, str) and template.endswith(".jinja"):
        template = (TRL_TEMPLATES / template).read_text()

    assert parser(tmp_path, template, tokens) == expected


def test_the_recipe_has_the_last_word_on_the_parser_of_calls(tmp_path) -> None:
    assert parser(tmp_path, "<tool_call>", [], tool_call_parser="xlam") == "xlam"
    off = {"enable-auto-tool-choice": False}
    command = ON_CPU.server_command(spec(arguments=off).model_copy(update={"model": tmp_path}), SOCKET)
    assert command.index("--no-enable-auto-tool-choice") > command.index("--enable-auto-tool-choice")


def test_every_parser_that_is_chosen_is_in_vllm_s_list() -> None:
    known = known_parsers(find_vllm().python)

    assert known is not None and known >= {name for _, name, _ in call_formats.MARKERS}
    assert parser_problem("hermes", find_vllm().python) is None
    problem = parser_problem("hermse", find_vllm().python)
    assert problem is not None and "did you mean hermes? It has apertus, " in problem


def test_tokens_are_guessed_ahead_as_the_launch_spec_says() -> None:
    def guessing(speculation: Speculation | None) -> dict[str, object]:
        command = ON_CPU.server_command(spec().model_copy(update={"speculation": speculation}), SOCKET)
        return json.loads(option(command, "--speculative-config")) if speculation else command

    assert "--speculative-config" not in guessing(None)
    assert guessing(Speculation(method="ngram"))["method"] == "ngram"
    assert guessing(Speculation(method="mtp")) == {"method": "mtp", "num_speculative_tokens": 1}
    draft = guessing(Speculation(method="draft", draft=Path("/models/small")))
    assert draft["method"] == "draft_model" and draft["model"] == "/models/small"
