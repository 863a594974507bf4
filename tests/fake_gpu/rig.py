"""Training steps of this project's engines on fake GPUs, which report memory, collectives and kernels."""

from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.data.batch import Batch, Documents
from stages.engines.media import with_media
from stages.engines.registry import BUILDERS, EngineInputs
from stages.engines.settings import MediaSettings
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.models.media import TOWER_OF, MediaSize, SoundSize, kind_of
from stages.models.processor import MediaProcessor
from stages.models.shape import ModelShape
from stages.models.walked import shape_of
from stages.parallel.layout import EngineName, Layout
from stages.planner.costs import SearchRequest
from stages.planner.hardware import HARDWARE, Efficiency
from stages.planner.memory import GIB
from stages.planner.search import estimate
from stages.planner.time import step_traffic
from stages.planner.workload import RowMedia
from tests.fake_gpu.devices import DEVICE, fake_gpus, megatron_on_fake_gpus
from tests.fake_gpu.models import write_model
from tests.fake_gpu.recorder import Recorder

KINDS = {
    "allgather": "all-gather",
    "allgather_into_tensor_coalesced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "message",
}
"""The planner's name of each kind of collective; what is received is what another rank sends."""
EXACT = Efficiency(runtime_gib=0.0, communicator_gib=0.0, fragmentation=0.0, streams=0.0)
"""The planner's constants for memory of tensors alone, without what the CUDA runtime and torch's allocator add."""
NUM_STEPS = 2
"""Training steps on fake GPUs: the first allocates optimizer state and FSDP2's buffers; the last is reported."""


@dataclass(frozen=True)
class Case:
    """Training step to run on fake GPUs: model, parallel layout and batch, seen from one rank."""

    model: str
    layout: dict[str, Any]
    engine: EngineName = "fsdp"
    num_layers: int | None = 4
    """Number of the model's layers. None means as many as the published model has."""
    micro_batches: int = 1
    documents: int = 1
    """Number of documents of equal length packed into each row."""
    sequence_length: int = 4096
    rank: int = 0
    media: int = 0
    """Number of media in each row, which is one document then."""
    medium: MediaSize = (640, 480)
    """Size of each of them."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of the train stage's config, such as `adapter` and `precision`."""

    @property
    def config(self) -> TrainConfig:
        """Config of a train stage that performs the case's training step."""
        layout = {"dp_shard": 1, "dp_replicate": 1, "micro_batch_size": 1} | self.layout
        shares = layout["dp_shard"] * layout["dp_replicate"]
        fields = {
            "kind": "train",
            "method": "sft",
            "model": "base",
            "data": {"dataset": "rows", "sequence_length": self.sequence_length},
            "global_batch_size": layout["micro_batch_size"] * shares * self.micro_batches,
            "learning_rate": 1e-5,
            "precision": "bf16",
            "engine": self.engine,
            "layout": layout,
        }
        return TrainConfig.model_validate(fields | self.options)


@dataclass(frozen=True)
class Report:
    """Record of a case's last training step on fake GPUs: memory, collectives and kernels of one rank."""

    shape: ModelShape
    layout: Layout
    """Parallel layout of the training step, in which the planner has chosen all values that are `auto`."""
    peak_bytes: int
    bytes_at_peak: dict[str, int]
    """Bytes at the memory peak by class of tensors: parameters, gradients, optimizer and others."""
    held_bytes: dict[str, int]
    """Bytes held between training steps by class of tensors, without the allocator's rounding."""
    collectives: dict[tuple[str, int], int]
    """Bytes that collectives sent or received (the larger of both), by kind of collective and number of ranks."""
    calls: dict[tuple[str, int], int]
    """Number of collective calls by kind of collective and number of ranks."""
    kernels: dict[str, int]
    forward_kernels: dict[str, int]
    """Number of kernels outside of backward passes, by operation: those of forward passes, and of the optimizer."""
    num_waits: int
    """Number of times that the host waits for the device in a training step, to read values of tensors."""
    predicted_gib: dict[str, float]
    """Memory in GiB that the planner predicts for the rank's tensors, by class."""
    predicted_traffic: dict[str, float]
    """Bytes of the rank's collectives that the planner predicts, by its kind of collective."""

    @property
    def traffic_error(self) -> float:
        """Largest difference between predicted and recorded bytes of a kind of collective, relative to all bytes."""
        recorded: Counter[str] = Counter()
        for (kind, ranks), size in self.collectives.items():
            if ranks > 1 and kind in KINDS:
                recorded[KINDS[kind]] += size
        kinds = recorded.keys() | self.predicted_traffic.keys()
        differences = (abs(recorded[kind] - self.predicted_traffic.get(kind, 0.0)) for kind in kinds)
        return max(differences, default=0.0) / max(1, recorded.total())

    @property
    def predicted_ratio(self) -> float:
        """Ratio of the planner's predicted peak memory of tensors to the recorded one."""
        return sum(self.predicted_gib.values()) * GIB / self.peak_bytes


def run(case: Case, folder: Path) -> Report:
    """Load an engine on fake GPUs, its model in `folder`, run `NUM_STEPS` training steps; report the last one."""
    config = case.config
    facts = ModelFacts(write_model(folder, case.model, case.num_layers))
    shape = shape_of(facts)
    num_ranks, hardware = config.layout.world_size, replace(HARDWARE["h100-80gb"], efficiency=EXACT)
    workload, media = config.workload, None
    batch = _batch(config.layout.micro_batch_size, case)
    if case.media:
        batch = _with_media(batch, facts.folder, case)
        assert batch.inputs.media
        part, kind = TOWER_OF[kind_of(case.medium)], kind_of(case.medium)
        patches = sum(batch.inputs.media.patches[part]) // len(batch.inputs.input_ids)
        workload = replace(workload, media=(RowMedia(patches, patches, patches / case.media, part),))
        media = MediaSettings(config.freeze, kinds=(kind,))
    request = SearchRequest(shape, workload, hardware, num_ranks)
    predicted = estimate(request, case.engine, config.layout)
    config = config.model_copy(update={"layout": predicted.layout})
    with fake_gpus(num_ranks, case.rank), ENGINES[case.engine](), Recorder() as recorder:
        settings = replace(config.engine_settings, media=media)
        inputs = EngineInputs(facts, settings, DEVICE, None, lambda _: [], folder, lambda _: None)
        engine = BUILDERS[case.engine](inputs)
        # Else documents would be padded rows, which have other kernels and take more memory.
        assert engine.tags.get("documents", "packed") == "packed", engine.tags["probe"]
        for _ in range(NUM_STEPS):
            recorder.begin_step()
            engine.train_step([batch] * case.micro_batches, SftLoss(), 1e-5, 1.0)
            held = {name: recorder.label(tensors, name) for name, tensors in STATES[case.engine](engine).items()}
    stage = case.rank * config.layout.pp // num_ranks  # pipeline stages are the outermost degree
    parts = vars(predicted.memory.stages[stage])
    return Report(
        shape=shape,
        layout=config.layout,
        peak_bytes=recorder.peak_bytes,
        bytes_at_peak=recorder.bytes_at_peak(),
        held_bytes=held,
        collectives=dict(recorder.collectives),
        calls=dict(recorder.calls),
        kernels=dict(recorder.kernels),
        forward_kernels=dict(recorder.forward_kernels),
        num_waits=recorder.num_waits,
        predicted_gib=dict(parts),
        predicted_traffic=step_traffic(shape, case.engine, config.layout, workload, stage_index=stage),
    )


def _batch(num_rows: int, case: Case) -> Batch:
    """Return a micro-batch in which every token is a target; the token ids are never read."""
    length = case.sequence_length // case.documents
    ids = torch.zeros(num_rows, case.sequence_length, dtype=torch.int64)
    numbers = torch.arange(num_rows * case.documents).repeat_interleave(length).view(num_rows, -1)
    documents = Documents(numbers, num_rows * case.documents, [length] * (num_rows * case.documents))
    return Batch.of(ids, ids, ids, documents)


def _with_media(batch: Batch, folder: Path, case: Case) -> Batch:
    """Return the batch with media at the beginning of each row."""
    processor = MediaProcessor(folder)
    tokens = torch.tensor(case.media * processor.token_ids(case.medium))
    ids = batch.inputs.input_ids.clone()
    ids[:, : len(tokens)] = tokens
    media = [[processor.drawn(case.medium)] * case.media for _ in ids]
    return with_media(replace(batch, inputs=replace(batch.inputs, input_ids=ids)), media, processor)


def _fsdp_states(engine: Any) -> dict[str, Iterable[Tensor]]:
    """Return the tensors that FSDP2 holds between training steps, by class: parameters and optimizer."""
    moments = [one for state in engine._optimizer.state.values() for one in state.values()]
    return {"parameters": list(engine._model.parameters()), "optimizer": moments}


def _megatron_states(engine: Any) -> dict[str, Iterable[Tensor]]:
    """Return the tensors that Megatron holds between steps, by class: parameters, gradient buffers, optimizer."""
    from stages.engines.megatron.optimizer_shards import local_optimizer_shards

    shards = local_optimizer_shards(engine._chunks, engine._shape, engine._adam.megatron)
    parameters = [one for chunk in engine._chunks for one in chunk.parameters()]
    return {
        "parameters": parameters,
        "gradients": [one.main_grad for one in parameters if one.requires_grad],
        "optimizer": [one for shard in shards for one in (shard.master, *shard.moments.values())],
    }


STATES = {"fsdp": _fsdp_states, "megatron": _megatron_states}
ENGINES = {"fsdp": nullcontext, "megatron": megatron_on_fake_gpus}


LORA: dict[str, Any] = {"adapter": {"rank": 16, "alpha": 32}}
NF4: dict[str, Any] = {"adapter": {"rank": 16, "alpha": 32, "base_precision": "nf4"}}
FP32: dict[str, Any] = {"precision": "fp32"}
CASES = {
    "one GPU": Case("qwen3-8b", {}),
    "one GPU, fp32": Case("qwen3-8b", {}, options=FP32),
    "one GPU, fp32, micro-batches": Case("qwen3-8b", {}, micro_batches=2, documents=8, options=FP32),
    "sharded": Case("qwen3-8b", {"dp_shard": 8}),
    "hybrid, gathered once": Case("qwen3-8b", {"dp_shard": 8, "dp_replicate": 2, "reshard_after_forward": False}),
    "selective": Case("qwen3-8b", {"dp_shard": 8, "recompute": "selective"}),
    "offload": Case("qwen3-8b", {"dp_shard": 8, "recompute": "offload", "micro_batch_size": 4}, micro_batches=2),
    "offload, one GPU": Case("qwen3-0.6b", {"recompute": "offload", "micro_batch_size": 4}, num_layers=12),
    "offload, LoRA": Case("llama3-70b", {"dp_shard": 8, "recompute": "offload"}, options=LORA),
    "offload, experts": Case("qwen3-30b-a3b", {"dp_shard": 8, "recompute": "offload"}, num_layers=3),
    "compiled": Case("qwen3-0.6b", {"dp_shard": 8, "compile": True, "micro_batch_size": 4}, num_layers=12),
    "compiled, selective": Case(
        "qwen3-0.6b", {"dp_shard": 8, "compile": True, "micro_batch_size": 4, "recompute": "selective"}, num_layers=12
    ),
    "compiled, LoRA": Case("qwen3-8b", {"dp_shard": 8, "compile": True}, num_layers=6, options=LORA),
    "compiled, full, one GPU": Case("qwen3-8b", {"compile": True, "recompute": "full", "micro_batch_size": 2}),
    "full, micro-batches": Case("qwen3-8b", {"dp_shard": 8, "recompute": "full"}, micro_batches=2),
    "micro-batches, sharded": Case("qwen3-8b", {"dp_shard": 8, "accumulate": "sharded"}, micro_batches=2),
    "LoRA": Case("qwen3-8b", {"dp_shard": 8}, options=LORA),
    "nf4": Case("qwen3-8b", {"dp_shard": 8}, options=NF4),
    "documents": Case("qwen3-8b", {"dp_shard": 8, "micro_batch_size": 2}, documents=8),
    "experts": Case("qwen3-30b-a3b", {"dp_shard": 8}, num_layers=1),
    "experts, short rows": Case("qwen3-30b-a3b", {"dp_shard": 8}, num_layers=3, sequence_length=512),
    "wide layers": Case("llama3-70b", {"dp_shard": 64, "recompute": "full"}, num_layers=3),
    "wide layers, LoRA": Case("llama3-70b", {"dp_shard": 64}, num_layers=3, options=LORA),
    "one GPU, LoRA": Case("llama3-70b", {}, num_layers=3, sequence_length=512, options=LORA),
    "one GPU, micro-batches": Case("qwen3-0.6b", {}, micro_batches=2, sequence_length=512),
    "head and embedding of one weight": Case("qwen3-0.6b", {"dp_shard": 8, "recompute": "full"}),
    "short rows": Case("qwen3-8b", {"dp_shard": 8}, sequence_length=256),
    "1,024 ranks": Case("llama3-70b", {"dp_shard": 1024}, num_layers=1),
    "tokens": Case("qwen3-8b", {"dp_shard": 4, "cp": 2}, sequence_length=8192),
    "tokens, full": Case("qwen3-8b", {"cp": 8, "recompute": "full"}, sequence_length=65536),
    "tokens, 1,024 ranks": Case("llama3-70b", {"dp_shard": 64, "cp": 16}, num_layers=1, sequence_length=65536),
    "matrices": Case("qwen3-8b", {"dp_shard": 4, "tp": 2}),
    "matrices, full, micro-batches": Case("qwen3-8b", {"dp_shard": 4, "tp": 2, "recompute": "full"}, micro_batches=2),
    "matrices, selective": Case("qwen3-8b", {"dp_shard": 2, "tp": 4, "recompute": "selective"}),
    "matrices, experts": Case("qwen3-30b-a3b", {"dp_shard": 4, "tp": 2}, num_layers=1),
    "matrices, long": Case("llama3-70b", {"tp": 8, "recompute": "full"}, num_layers=2, sequence_length=65536),
    "matrices, large vocabulary": Case("qwen3-256k", {"tp": 2, "recompute": "full"}),
    "matrices and tokens": Case("qwen3-8b", {"cp": 4, "tp": 2, "recompute": "full"}, sequence_length=65536),
    "matrices and tokens, 1,024 ranks": Case(
        "llama3-70b", {"dp_shard": 16, "cp": 8, "tp": 8}, num_layers=1, sequence_length=65536
    ),
    "experts, spread": Case("qwen3-30b-a3b", {"dp_shard": 8, "ep": 4}, num_layers=2),
    "experts, spread, matrices": Case("qwen3-30b-a3b", {"dp_shard": 4, "ep": 4, "tp": 2}, num_layers=2),
    "matrices, LoRA": Case("qwen3-8b", {"dp_shard": 4, "tp": 2}, options=LORA),
    "matrices, LoRA, selective": Case("qwen3-8b", {"dp_shard": 2, "tp": 4, "recompute": "selective"}, options=LORA),
    "gathered matrices, LoRA": Case("phi3", {"dp_shard": 4, "tp": 2}, options=LORA),
    "gathered matrices, LoRA on some": Case(
        "phi3", {"dp_shard": 4, "tp": 2}, options={"adapter": {"rank": 16, "target_modules": ["qkv_proj"]}}
    ),
    "gathered matrices, LoRA, full": Case("olmo2", {"dp_shard": 4, "tp": 2, "recompute": "full"}, options=LORA),
    "norms after sums, full": Case("gemma2", {"dp_shard": 4, "tp": 2, "recompute": "full"}),
    "experts with biases, selective": Case("gpt_oss", {"dp_shard": 8, "recompute": "selective"}),
    "experts with biases, spread": Case("gpt_oss", {"dp_shard": 8, "ep": 4, "recompute": "selective"}),
    "tokens, compiled": Case("qwen3-8b", {"dp_shard": 4, "cp": 2, "compile": True}, sequence_length=8192),
    "tokens of blocks": Case("qwen3-8b", {"dp_shard": 2, "tp": 4, "sequence_parallel": True}),
    "tokens of blocks, full, micro-batches": Case(
        "qwen3-8b", {"dp_shard": 4, "tp": 2, "sequence_parallel": True, "recompute": "full"}, micro_batches=2
    ),
    "tokens of blocks, selective": Case(
        "qwen3-8b", {"dp_shard": 2, "tp": 4, "sequence_parallel": True, "recompute": "selective"}
    ),
    "tokens of blocks, 1,024 ranks": Case(
        "llama3-70b",
        {"dp_shard": 16, "cp": 8, "tp": 8, "sequence_parallel": True},
        num_layers=1,
        sequence_length=65536,
    ),
    "tokens of blocks, LoRA": Case("qwen3-8b", {"dp_shard": 2, "tp": 4, "sequence_parallel": True}, options=LORA),
    "megatron": Case("qwen3-8b", {"dp_shard": 4, "tp": 2}, engine="megatron"),
    "megatron, pipeline": Case(
        "qwen3-8b", {"dp_shard": 4, "tp": 2, "pp": 2, "sequence_parallel": True}, engine="megatron", micro_batches=4
    ),
    "megatron, last stage": Case(
        "qwen3-8b",
        {"dp_shard": 4, "tp": 2, "pp": 2, "sequence_parallel": True},
        engine="megatron",
        micro_batches=4,
        rank=15,
    ),
    "megatron, context": Case("qwen3-8b", {"dp_shard": 2, "cp": 2}, engine="megatron"),
    "megatron, context, full": Case("qwen3-8b", {"dp_shard": 2, "cp": 2, "recompute": "full"}, engine="megatron"),
    "megatron, full": Case("qwen3-8b", {"dp_shard": 4, "tp": 2, "recompute": "full"}, engine="megatron"),
    "megatron, LoRA": Case("qwen3-8b", {"dp_shard": 4, "tp": 2}, engine="megatron", options=LORA),
    "megatron, 1,024 ranks": Case("llama3-70b", {"dp_shard": 128, "tp": 8}, engine="megatron", num_layers=1),
}
"""Training steps that nightly tests run on fake GPUs, by name. The models' layers are as wide as published ones, but
few."""
PICTURES = {
    "full": Case("llava-7b", {"dp_shard": 8, "recompute": "full"}, media=6),
    "tower alone": Case("llava-7b", {"dp_shard": 8}, media=6, options={"freeze": ["language_model"]}),
    "matrices, full": Case("llava-7b", {"dp_shard": 4, "tp": 2, "recompute": "full"}, media=6),
    "matrices, tower alone": Case(
        "llava-7b", {"dp_shard": 2, "tp": 4}, media=6, options={"freeze": ["language_model"]}
    ),
    "frozen tower": Case("llava-7b", {}, media=6, options={"freeze": ["vision_tower"]}),
}
"""Training steps on rows with pictures."""
SECONDS_30 = SoundSize(30 * 16000, 16000)
_SOUNDS = Case("qwen2-audio-7b", {"dp_shard": 8}, media=4, medium=SECONDS_30)
SOUNDS = {
    "full": replace(_SOUNDS, layout={"dp_shard": 8, "recompute": "full"}),
    "tower alone": replace(_SOUNDS, options={"freeze": ["language_model"]}),
}
"""Training steps on rows with sounds."""
