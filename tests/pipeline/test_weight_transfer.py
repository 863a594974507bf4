"""A vLLM takes new weights from the memory of the training, all of them or none, and answers with them.

Every night; `make test` has a GRPO stage whose vLLM takes weights so, and is held to the training's log-probabilities
after each update (`test_grpo.py`), and unit tests of the memory, the messages and the refused pickles.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.core.errors import ServerError
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.held_weights import Bucket, HeldWeights
from stages.serving.registry import chosen_engine, new_launch_spec
from stages.serving.server import Server, started_server
from stages.serving.vllm.engine import find_vllm
from stages.serving.vllm.transfers import ipc, memory, nccl
from tests.serving import served_processes
from tests.train_stage import make_artifacts

READ_BY_VLLM = """
import inspect, json, sys
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor
import ipc_handles
asked = json.load(sys.stdin)
joined, sent = NCCLWeightTransferInitInfo(**asked["nccl_init"]), NCCLWeightTransferUpdateInfo(**asked["nccl_update"])
assert ipc_handles.HandlesEngine in [WeightTransferEngineFactory._registry["ipc_handles"]()]
introduced = IPCWeightTransferInitInfo(**asked["ipc_init"])
mapped = ipc_handles.Buffer(**asked["ipc_update"]).for_vllm()
arguments = inspect.signature(rebuild_cuda_tensor).bind(*mapped.ipc_handles["GPU-1"]).arguments
dtypes = [getattr(torch, name) for name in mapped.dtype_names]
content = torch.frombuffer(bytearray.fromhex(asked["content"]), dtype=torch.uint8)
unpacked = unpack_tensor(content, mapped.names, mapped.shapes, dtypes, mapped.tensor_sizes)
print(json.dumps({
    "id": joined.nccl_unique_id_bytes.hex(), "world_size": joined.world_size, "rank_offset": joined.rank_offset,
    "packed": [joined.packed, introduced.packed], "names": sent.names, "shapes": sent.shapes,
    "storage_handle": arguments["storage_handle"].hex(), "storage_device": arguments["storage_device"],
    "sizes": [arguments["storage_size_bytes"], arguments["storage_offset_bytes"], list(arguments["tensor_size"])],
    "counter": [arguments["ref_counter_handle"].hex(), arguments["ref_counter_offset"]],
    "event": [arguments["event_handle"].hex(), arguments["event_sync_required"]],
    "position_of_device": list(arguments).index("storage_device"),
    "unpacked": {name: tensor.float().flatten().tolist() for name, tensor in unpacked},
}))
"""
pytestmark = pytest.mark.nightly
TOKENS = list(range(5, 69))
MOST_NATS = 1e-4
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Sampler:
    """Running vLLM, the connection of this process with it, and the trained model as files hold it."""

    server: Server
    connection: memory.MemoryConnection
    folder: Path
    weights: dict[str, torch.Tensor]

    def answers_as(self, weights: dict[str, torch.Tensor]) -> bool:
        """Return whether the server's log-probabilities are those of Transformers with these weights."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
        logits = model(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
        found = torch.tensor(self.server.client.predictions([TOKENS])[0].log_probabilities)
        return (found - expected).abs().mean().item() < MOST_NATS


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    tmp_path = tmp_path_factory.mktemp("sampler")
    trained = make_artifacts(tmp_path)["base"] / "model"
    served = shutil.copytree(trained, tmp_path / "served")
    serving = ServingConfig(dtype="float32", max_model_len=128, kv_cache_memory_gib=0.0625, enforce_eager=True)
    engine = chosen_engine(serving)
    engine.prepare_reloads(served)
    way = engine.weight_transfer("cpu", "separate")
    spec = new_launch_spec(served, "policy", serving).model_copy(update={"for_training": True, "weight_transfer": way})
    runtime = tmp_path / "server"
    with started_server(spec, ServeExecution(), tmp_path / "server.log", runtime) as server:
        server.wait_until_ready(150)
        with engine.connected(server.address, server.api_key, spec, TIMEOUT_S) as connection:
            assert isinstance(connection, memory.MemoryConnection)
            yield Sampler(server, connection, trained, load_file(trained / "model.safetensors"))
    assert not served_processes(runtime)


def changed(weights: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: one + 0.05 * torch.randn(one.shape, generator=generator) for name, one in weights.items()}


def held(weights: dict[str, torch.Tensor]) -> HeldWeights:
    return HeldWeights.gather(weights.items())


def mapped_in(runtime: Path) -> list[str]:
    """Return the lines of memory maps, of all processes of a server, that are of held weights."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in served_processes(runtime)]
    assert maps
    return [line for text in maps for line in text.splitlines() if "memfd:weights-" in line]


def test_it_answers_with_the_newest_weights(sampler: Sampler) -> None:
    """Also after a second update; a server keeps none of the training's memory."""
    assert sampler.answers_as(sampler.weights)
    for step in (1, 2):
        newer = changed(sampler.weights, step)
        assert not sampler.answers_as(newer)
        weights = held(newer)
        sampler.connection.give(weights)
        weights.close()
        assert sampler.answers_as(newer)
        assert not mapped_in(sampler.server.log_file.parent / "server")


def refusal(sampler: Sampler, bucket: Bucket) -> str:
    """Return why the server's worker refuses a message about a bucket."""
    sampler.connection.server.start()
    with pytest.raises(ServerError) as refused:
        sampler.connection.server.update(sampler.connection._message(bucket, {}))
    return str(refused.value)


def test_it_takes_no_others(sampler: Sampler) -> None:
    """Names, shapes and files that are not the training's weights are refused, here and by the server's workers.

    After a refusal it takes all weights: none is left half new.
    """
    name, (other, *_) = "model.norm.weight", sampler.weights
    cases: dict[str, dict[str, torch.Tensor]] = {
        "model.layers.9.x is no weight of the served model": {"model.layers.9.x": sampler.weights[name]},
        f"{name} has the shape": {name: torch.ones(3)},
    }
    for expected, weights in cases.items():
        several = held({**sampler.weights, **weights})
        with pytest.raises(ServerError, match="1 of the training's are not its own, or have another shape"):
            sampler.connection.give(several)
        several.close()
        alone = held(weights)
        assert expected in refusal(sampler, alone.buckets[0])
        alone.close()
    whole = held(sampler.weights)
    (bucket,) = whole.buckets
    twice = replace(bucket, weights=[bucket.weights[0], bucket.weights[0]])
    assert f"{other} came twice" in refusal(sampler, twice)
    beyond = replace(bucket, weights=[replace(bucket.weights[0], offset=bucket.num_bytes)])
    assert "lies outside its memory file" in refusal(sampler, beyond)
    for_others = replace(bucket, name="weights-of-others")
    assert "not the memory file weights-of-others" in refusal(sampler, for_others)
    with Path("/etc/hostname").open() as other_file:
        assert "not the memory file" in refusal(sampler, replace(bucket, descriptor=other_file.fileno()))
    open_bucket = Bucket.empty()
    open_bucket.add(name, sampler.weights[name])
    assert "it has not all seals" in refusal(sampler, open_bucket)
    open_bucket.close()
    sampler.connection.give(whole)
    assert sampler.answers_as(sampler.weights)
    whole.close()


def test_it_takes_all_or_says_which_it_lacks(sampler: Sampler) -> None:
    some = {name: one for name, one in sampler.weights.items() if "norm" not in name}
    weights = held(some)
    with pytest.raises(ServerError, match=r"it has \d+ that the training does not \(model.layers.0.input_layernorm"):
        sampler.connection.give(weights)
    routes = sampler.connection.server
    routes.start()
    for bucket in weights.buckets:
        routes.update(sampler.connection._message(bucket, {}))
    with pytest.raises(ServerError, match=r"\d+ weights did not come: lm_head.weight, model.layers.0.input_layernorm"):
        routes.finish()
    weights.close()


def test_it_does_not_unpickle(sampler: Sampler) -> None:
    """vLLM's switch for pickles in requests is off, whatever our environment says."""
    (pid, *_) = served_processes(sampler.server.log_file.parent / "server")
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION=0" in environment
    assert os.getpid() != pid


def test_what_is_sent_for_gpus_is_what_vllm_reads() -> None:
    """The messages of NCCL and IPC, which no GPU has seen, by the installed vLLM's own classes."""
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0).bfloat16()}
    held = HeldWeights.gather(weights.items())
    (bucket,) = held.buckets
    handle = {
        **{"handle": "AQI=", "storage_bytes": 512, "storage_offset": 256, "counter": "Aw==", "counter_offset": 4},
        **{"event": "BQY=", "event_sync": True, "num_bytes": bucket.num_bytes},
    }
    asked = {
        "nccl_init": nccl.init_info(bytes(range(128)), 3),
        "nccl_update": memory.described(bucket.weights),
        "ipc_init": {"packed": True},
        "ipc_update": ipc.message(bucket, {"GPU-1": handle}),
        "content": bytes(bucket.content()).hex(),
    }
    held.close()
    ended = subprocess.run(
        [find_vllm().python, "-P", "-c", READ_BY_VLLM],
        input=json.dumps(asked),
        env={"PYTHONPATH": str(memory.IN_WORKER), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        **{"id": bytes(range(128)).hex(), "world_size": 3, "rank_offset": 1, "packed": [False, True]},
        **{"names": ["a", "b"], "shapes": [[2, 3], [4]]},
        **{"storage_handle": "0102", "storage_device": 0, "position_of_device": 6},
        **{"sizes": [512, 256, [bucket.num_bytes]], "counter": ["03", 4], "event": ["0506", True]},
        "unpacked": {name: weight.float().flatten().tolist() for name, weight in weights.items()},
    }
