"""LoRA adapters in vLLM 0.32: the server options that they need, and checks of what vLLM cannot serve.

Each option was checked with a server that fails without it (tests/pipeline/test_serve_adapters.py):

- `--lora-target-modules` names the layers that the adapters have, and no others. With the head among the layers that
  may have adapters (the default), two requests for log-probabilities of prompts in one batch end the engine; an
  adapted layer that is not named is silently left out.
- `--max-loras` is one more than there are adapters: in a batch with adapters, "no adapter" is slot -1, which is the
  last slot, and requests to the base are answered by whatever adapter has it.
- `--max-lora-rank` is the next of the sizes that vLLM has; it pads adapters of lower rank with zeros itself.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from stages.adapters.headers import CHANGES_THE_BASE, AdapterHeaders, read_headers
from stages.core.errors import ModelError
from stages.serving.engine import LaunchSpec

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM accepts for `--max-lora-rank`."""
EDGES = {"embed_tokens", "lm_head"}
UNKNOWN = ("use_dora", "modules_to_save", "lora_bias", "target_parameters", "use_qalora", "use_bdlora")
"""Options in PEFT's adapter_config.json that vLLM does not support."""
EXPERTS = "experts"
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which model configs hold the number of experts."""
NUM_NAMED = 5


def adapter_arguments(spec: LaunchSpec) -> list[str]:
    """Return the options of `vllm serve` for a server with adapters, from the headers of the adapters' files."""
    max_rank, modules = _room(spec)
    # As JSON: a path may hold any character.
    named = [json.dumps({"name": name, "path": str(folder)}) for name, folder in spec.adapters.items()]
    return [
        "--enable-lora",
        *("--max-lora-rank", str(max_rank)),
        *("--max-loras", str(len(spec.adapters) + 1)),
        *("--lora-target-modules", *sorted(modules)),
        *("--lora-modules", *named),
    ]


def has_room(spec: LaunchSpec, adapter: Path) -> bool:
    """Return whether a vLLM server, started from a launch spec, could load one more adapter with all its layers."""
    headers = read_headers(adapter)
    max_rank, modules = _room(spec)
    return not any(_problems(headers)) and max(headers.ranks.values()) <= max_rank and _modules(headers) <= modules


def _room(spec: LaunchSpec) -> tuple[int, set[str]]:
    """Return the largest LoRA rank and the names of adapted layers that a server of this launch spec supports."""
    headers = [read_headers(folder) for folder in spec.adapters.values()]
    highest = max(rank for adapter in headers for rank in adapter.ranks.values())
    modules = {name for adapter in headers for name in _modules(adapter)}
    return next(rank for rank in MAX_RANKS if rank >= highest), modules


def check_adapters(spec: LaunchSpec) -> None:
    """Raise ModelError for a duplicate adapter name, or a base model or an adapter that vLLM could not serve."""
    if spec.own_name in spec.adapters:
        raise ModelError(f"two of the served models are called {spec.own_name}: give each a name of its own")
    if spec.facts.quantization:
        raise ModelError(
            f"serving {', '.join(spec.adapters)} on {spec.model}: it is quantized, and an adapter changes the outputs "
            "of the very weights that it was trained on; serve it on the unquantized model, or merge it into that "
            "(`kind: merge`) and quantize the merged model"
        )
    if "cpu" in spec.engine_version and any(spec.facts.fields.get(name) for name in NUM_EXPERTS):
        raise ModelError(
            f"serving {', '.join(spec.adapters)} on {spec.model}: it is a mixture of experts, which vLLM with adapters "
            "computes by Triton only, wherever they are: on a CPU it starts, and ends at the first request. Merge the "
            "adapter into its base (`kind: merge`) and serve that, or serve it on a GPU"
        )
    for name, folder in spec.adapters.items():
        if problems := "; ".join(_problems(read_headers(folder))):
            raise ModelError(
                f"serving the adapter {name} ({folder}): {problems}; vLLM serves plain LoRA. Merge it into its base "
                "(`kind: merge`) and serve that"
            )


def _problems(headers: AdapterHeaders) -> Iterator[str]:
    """Yield the reasons why vLLM could not serve an adapter, from the headers of its file and its config."""
    config = headers.config
    options = [f"{field}: {_first(config[field])}" for field in UNKNOWN if config.get(field)]
    options += [f"bias: {config['bias']}"] if config.get("bias", "none") != "none" else []
    initialization = config.get("init_lora_weights")
    if isinstance(initialization, str) and initialization.lower().startswith(CHANGES_THE_BASE):
        options.append(f"init_lora_weights: {initialization}, which has changed the base")
    if config.get("peft_type", "LORA") != "LORA" or options:
        yield f"it is a {config.get('peft_type', 'LORA')} with {', '.join(options) or 'weights of another kind'}"
    if edges := sorted(EDGES & _modules(headers)):
        yield f"it adapts {', '.join(edges)}"
    if headers.others:
        yield f"its file holds {', '.join(headers.others[:NUM_NAMED])}"
    too_high = {rank for rank in headers.ranks.values() if rank > MAX_RANKS[-1]}
    if too_high:
        yield f"its rank is {max(too_high)}, more than {MAX_RANKS[-1]}"


def _first(value: object) -> object:
    """Return a config value for a message, with a long list cut short, as it may name thousands of parameters."""
    return [*value[:NUM_NAMED], "…"] if isinstance(value, list) and len(value) > NUM_NAMED else value


def adapted_kinds(folder: Path) -> set[str]:
    """Return the kinds of layers that an adapter has, such as `q_proj`; raise ModelError for damaged files."""
    return _modules(read_headers(folder))


def _modules(headers: AdapterHeaders) -> set[str]:
    """Return the names of the adapted kinds of layers, such as `q_proj`; all experts of a layer count as `experts`."""
    return {EXPERTS if f".{EXPERTS}." in layer else layer.rpartition(".")[2] for layer in headers.ranks}
