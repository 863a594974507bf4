"""Cases in which the Megatron engine is compared with plain Transformers: models, data, adapters, layouts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Row = list[list[int]]

NUM_STEPS, NUM_ROWS, ROW_TOKENS = 5, 4, 24
VOCABULARY = 64
ODD_VOCABULARY = 63
"""Vocabulary size that does not divide evenly among tensor-parallel ranks."""
LENGTHS = {
    "packed": [(9, 5, 10), (24,), (3, 2, 19), (12, 12)],
    "single": [(24,)] * NUM_ROWS,
    "pairs": [(7, 5, 6, 6), (12, 12), (4, 8, 5, 7), (10, 14)],
}
"""Lengths in tokens of the packed documents in each row of a global batch, by kind of test data."""
LEARNING_RATE, WEIGHT_DECAY, BETA = 5e-3, 0.1, 0.1
MAX_GRAD_NORM = {"sft": 0.5, "dpo": 0.1}
"""Bound for gradient clipping by method, below all gradient norms, so that every step is clipped."""
EPSILON = 1e-3
"""Adam's epsilon in comparisons, far above the usual 1e-8. With 1e-8 every gradient, however small, moves its weight by
the learning rate, and rounding errors of 1e-9 in gradients that are nearly zero would show as differences of 1e-2."""

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, vocab_size=VOCABULARY, tie_word_embeddings=False, rope_parameters=STRETCHED)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, vocab_size=ODD_VOCABULARY, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, vocab_size=VOCABULARY, tie_word_embeddings=True)),
    "qwen3-3-layers": lambda: Qwen3ForCausalLM(
        Qwen3Config(**{**SIZES, "num_hidden_layers": 3}, vocab_size=VOCABULARY, tie_word_embeddings=True)
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **EXPERTS, vocab_size=VOCABULARY, tie_word_embeddings=False)
    ),
    "qwen3-moe-dense": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES,
            **{**EXPERTS, "norm_topk_prob": False},
            vocab_size=VOCABULARY,
            tie_word_embeddings=True,
            mlp_only_layers=[1],
        )
    ),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, vocab_size=VOCABULARY, tie_word_embeddings=False, sliding_window=7)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, vocab_size=VOCABULARY, num_local_experts=4)),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 6, "alpha": 12},
    "some": {
        "rank": 3,
        "alpha": 5.5,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
        "exclude_modules": ["layers.1.mlp.up_proj"],
        "layers_to_transform": [0, 1],
    },
    "attention": {
        "rank": 4,
        "alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "loraplus_lr_ratio": 2.0,
    },
    "experts": {"rank": 3, "alpha": 7},
    "down": {
        "rank": 3,
        "alpha": 5,
        "use_rslora": True,
        "target_modules": [],
        "target_parameters": ["experts.down_proj"],
    },
}
"""LoRA adapter configs of the test cases, by name.

`some`: on parts of the layers that Megatron joins, and nothing on the last pipeline stage. `experts`: on what PEFT
reads all-linear as for a mixture: attention, experts and router.
"""
MOE: dict[str, dict[str, Any]] = {"balanced": {"aux_loss_coefficient": 0.3}, "frozen": {"freeze_router": True}}
SEED = 3


@dataclass(frozen=True)
class Case:
    """Test case in which Megatron is compared with plain Transformers: model, layout, data, and perhaps an adapter."""

    model: str
    layout: dict[str, Any] = field(default_factory=dict)
    data: str = "packed"
    adapter: str | None = None
    moe: str | None = None

    @property
    def method(self) -> str:
        return "dpo" if self.data == "pairs" else "sft"

    @property
    def everything_decays(self) -> bool:
        """Return whether weight decay applies to norms and biases, too: it does in the cases with "single" data."""
        return self.data == "single"

    @property
    def name(self) -> str:
        degrees = {key: value for key, value in self.layout.items() if key != "micro_batch_size"}
        adapter = [*([f"adapter-{self.adapter}"] if self.adapter else []), *([self.moe] if self.moe else [])]
        words = [key if value is True else f"{key}{value}" for key, value in degrees.items()] or ["plain"]
        return " ".join([self.model, *adapter, self.data, *words, f"rows{self.layout.get('micro_batch_size', 1)}"])


def cases(processes: int) -> list[Case]:
    """Return all test cases of the Megatron comparison that run on this number of processes."""
    return {1: _alone, 2: _two, 4: _four}[processes]()


def values_of(case: Case) -> dict[str, object]:
    """Return a case's values by name, for `pairwise`; TP with and without sequence parallelism are two values."""
    degrees = {name: value for name, value in case.layout.items() if name not in ("micro_batch_size", "tp")}
    degrees.pop("sequence_parallel", None)
    tp = (case.layout.get("tp", 1), case.layout.get("sequence_parallel", False))
    rows = case.layout.get("micro_batch_size", 1)
    chosen = {"adapter": case.adapter, "moe": case.moe}
    return {
        "model": case.model,
        "data": case.data,
        **{name: value for name, value in chosen.items() if value},
        **({"tp": tp} if tp[0] > 1 else {}),
        **({"rows": rows} if rows > 1 else {}),
        **degrees,
    }


def _alone() -> list[Case]:
    models = [Case(model, {"micro_batch_size": 4}) for model in MODELS]
    choices: list[dict[str, Any]] = [{}, {"recompute": "full"}, {"recompute": "selective"}]
    return [
        *models,
        *(Case("llama", layout) for layout in choices),
        Case("llama", {"micro_batch_size": 2}, "single"),
        Case("llama", {"micro_batch_size": 2}, "pairs"),
        Case("llama", adapter="all"),
        Case("llama", {"recompute": "full"}, adapter="all"),
        Case("qwen3", adapter="some"),
        Case("qwen3-moe", adapter="experts"),
        Case("mixtral", {"recompute": "full"}, adapter="experts"),
        Case("qwen3-moe", adapter="experts", moe="balanced"),
        Case("qwen3-moe-dense", {"micro_batch_size": 2, "recompute": "full"}, moe="balanced"),
    ]


def _two() -> list[Case]:
    tp, sp = {"tp": 2}, {"tp": 2, "sequence_parallel": True}
    pp, vpp, cp = {"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}
    replicated, sharded, experts = {"dp_replicate": 2}, {"dp_shard": 2}, {"dp_shard": 2, "ep": 2}
    every = [tp, sp, pp, vpp, cp, replicated, sharded]
    return [
        *(Case("llama", layout) for layout in every),
        *(Case("llama", layout, "single") for layout in (sp, vpp, cp)),
        *(Case("llama", layout, "pairs") for layout in every),
        *(Case("qwen3", layout) for layout in (tp, pp, vpp, cp, sharded)),
        *(Case("qwen2", layout) for layout in (tp, pp)),
        *(Case("mistral", layout) for layout in (sp, cp)),
        Case("qwen3-3-layers", pp),
        *(Case("llama", {**layout, "recompute": "full"}) for layout in (sp, vpp, cp)),
        *(Case("llama", {**layout, "recompute": "selective"}) for layout in (sp, cp)),
        *(Case("llama", {**layout, "micro_batch_size": 2}) for layout in (sp, pp, cp, sharded)),
        *(Case("qwen3-moe", layout) for layout in (sp, {**sp, "etp": 2}, pp, vpp, cp, sharded, experts)),
        *(Case("qwen3-moe", layout) for layout in ({"dp_replicate": 2, "ep": 2}, {**sp, "ep": 2}, {**cp, "ep": 2})),
        Case("qwen3-moe", experts, "pairs"),
        Case("qwen3-moe-dense", pp),
        Case("qwen3-moe-dense", experts),
        *(Case("mixtral", layout) for layout in (sp, pp, experts)),
        *(Case("llama", layout, adapter="all") for layout in every),
        *(Case("llama", layout, "pairs", "all") for layout in (tp, pp)),
        *(Case("llama", {**layout, "recompute": "full"}, adapter="all") for layout in (sp, pp)),
        *(Case("qwen3", layout, adapter="some") for layout in (sp, pp, vpp, sharded)),
        *(Case("qwen3-moe", layout, adapter="attention") for layout in (sp, experts)),
        *(
            Case("qwen3-moe", layout, adapter="experts")
            for layout in (sp, {**sp, "etp": 2}, pp, experts, {**sp, "ep": 2})
        ),
        Case("qwen3-moe", experts, "pairs", "experts"),
        Case("mixtral", experts, adapter="down"),
        Case("qwen3-moe", sp, adapter="attention", moe="balanced"),
        *(Case("qwen3-moe", layout, moe="balanced") for layout in (sp, vpp, cp, sharded)),
        Case("mixtral", {**pp, "recompute": "full"}, moe="balanced"),
        Case("mixtral", experts, moe="frozen"),
    ]


def _four() -> list[Case]:
    sp, pp, cp = {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"cp": 2}
    products: list[dict[str, Any]] = [
        {"pp": 4},
        {**sp, **cp},
        {**cp, **pp},
        {**sp, **pp},
        {**sp, **pp, "vpp": 2},
        {**cp, **pp, "vpp": 2},
        {**sp, "dp_shard": 2},
        {**pp, "dp_shard": 2},
        {**cp, "dp_shard": 2},
        {"dp_replicate": 2, "dp_shard": 2},
        {"cp": 4},
    ]
    return [
        *(Case("llama", layout) for layout in products),
        *(Case("llama", layout, "pairs") for layout in products[:5]),
        Case("qwen3", {**sp, **pp}),
        Case("qwen3", {"pp": 4}),
        Case("qwen3-moe", {**sp, "dp_shard": 2, "ep": 2}),
        Case("qwen3-moe", {**sp, "dp_shard": 2, "ep": 2, "etp": 2}),
        Case("qwen3-moe", {**pp, "dp_shard": 2, "ep": 2}),
        Case("qwen3-moe", {**sp, **pp, "vpp": 2, "ep": 2}),
        Case("qwen3-moe", {"dp_shard": 4, "ep": 4}),
        Case("qwen3-moe", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
        Case("llama", {"dp_replicate": 2, **cp}),
        Case("qwen3-moe", {**cp, **sp, "ep": 2}, "pairs"),
        Case("llama", {**sp, **pp}, adapter="all"),
        Case("llama", {"tp": 4, "sequence_parallel": True}, adapter="all"),
        Case("llama", {**cp, "dp_shard": 2}, adapter="all"),
        Case("qwen3-moe", {**pp, "dp_shard": 2, "ep": 2}, adapter="attention"),
        *(Case("qwen3-moe", {**layout, "dp_shard": 2, "ep": 2}, adapter="experts") for layout in (sp, pp)),
        Case("qwen3-moe", {**sp, "dp_shard": 2, "ep": 2, "etp": 2}, adapter="experts"),
        Case("qwen3-moe", {**cp, **sp, "ep": 2}, moe="balanced"),
    ]


def make_models(folder: Path) -> None:
    """Write a Hugging Face folder for each tiny model, with random norms and biases, so that errors in them show."""
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder / name)


def global_batches(data: str) -> list[list[Row]]:
    """Return the random token ids of every step's global batch, by row and document."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            [torch.randint(0, ODD_VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
            for lengths in LENGTHS[data]
        ]
        for _ in range(NUM_STEPS)
    ]


def train_config(case: Case) -> dict[str, Any]:
    """Return the train stage's config of a test case as a dict."""
    return {
        "kind": "train",
        "engine": "megatron",
        "method": case.method,
        "model": "base",
        "data": {"dataset": "data"},
        "layout": case.layout,
        "global_batch_size": NUM_ROWS,
        "learning_rate": LEARNING_RATE,
        "adam_epsilon": EPSILON,
        "weight_decay": WEIGHT_DECAY,
        "decay_norms_and_biases": case.everything_decays,
        "max_grad_norm": MAX_GRAD_NORM[case.method],
        "precision": "fp32",
        "seed": SEED,
        **({"dpo": {"beta": BETA}} if case.method == "dpo" else {}),
        **({"adapter": ADAPTERS[case.adapter]} if case.adapter else {}),
        **({"moe": MOE[case.moe]} if case.moe else {}),
    }
