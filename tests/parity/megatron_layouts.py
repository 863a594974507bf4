"""Comparison of training with the Megatron engine and with plain Transformers, under every parallel layout.

Run: `python tests/parity/megatron_layouts.py`.
Prints, for each case and then for each group of layouts, the largest differences in log-probabilities, loss, gradient,
gradient norm (relative) and weights after five AdamW steps, in fp32. `test_megatron_layouts.py` holds the same numbers
to their bounds; `stages/engines/parity.md` shows the table of groups.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.parity.megatron_cases import (  # noqa: E402
    ADAPTERS,
    BETA,
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MOE,
    SEED,
    WEIGHT_DECAY,
    Case,
    cases,
    global_batches,
    make_models,
)
from tests.parity.plain_adam import trainer_parameter_groups  # noqa: E402
from tests.parity.ranks import Ranks, started_ranks  # noqa: E402
from tests.parity.test_fsdp import mean_aux_loss  # noqa: E402

LEAST_LEARNED = 1e-4
"""Smallest maximum of |B| that each trained LoRA factor B must reach, so that a factor left at 0 is noticed."""
LIMITS = {"log_probability": 1e-5, "loss": 1e-6, "gradient": 1e-6, "grad_norm": 1e-5, "weight": 1e-6}
"""Largest tolerated differences from plain Transformers, absolute, but relative for the gradient norm."""


@dataclass(frozen=True)
class Expected:
    """Results of training a model in a minimal Transformers loop, which the Megatron engine must match."""

    log_probabilities: Tensor
    predictions: Tensor
    gradients: dict[str, Tensor]
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    references: list[Tensor]
    """Log-probability of each document of the first global batch before training."""
    aux_losses: list[float]


@dataclass(frozen=True)
class Comparison:
    """Result of one test case: the largest difference to plain Transformers in losses, gradients, weights and so on."""

    case: Case
    differences: dict[str, float]


def main() -> None:
    columns = "".join(f"{name:>17}" for name in LIMITS)
    print(f"{'processes, model, data and layout':60}{columns}")
    groups: dict[str, list[Comparison]] = {}
    with tempfile.TemporaryDirectory(prefix="megatron-layouts-") as folder, started_ranks() as ranks:
        make_models(Path(folder) / "models")
        for processes in (1, 2, 4):
            for comparison in compare(ranks, Path(folder), processes, cases(processes)):
                numbers = "".join(f"{comparison.differences[name]:>17.1e}" for name in LIMITS)
                print(f"{processes} {comparison.case.name:58}{numbers}", flush=True)
                groups.setdefault(group(comparison.case), []).append(comparison)
    print(table(groups))


def table(groups: dict[str, list[Comparison]]) -> str:
    """Return a Markdown table: for each group of layouts, the largest differences of results to plain Transformers."""
    lines = [f"| layouts | cases | {' | '.join(LIMITS)} |", f"| --- | ---: |{' ---: |' * len(LIMITS)}"]
    for name, members in sorted(groups.items()):
        largest_of_group = [max(member.differences[limit] for member in members) for limit in LIMITS]
        lines.append(f"| {name} | {len(members)} | {' | '.join(f'{value:.1e}' for value in largest_of_group)} |")
    bounds = " | ".join(f"{limit:.0e}" for limit in LIMITS.values())
    num_cases = sum(map(len, groups.values()))
    return "\n".join([*lines, f"| **bound, all {num_cases} cases** | | {bounds} |"])


def group(case: Case) -> str:
    """Return the title of a test case's line in the result table, which names its group of layouts."""
    degrees = case.layout.keys() - {"micro_batch_size", "sequence_parallel", "recompute"}
    if case.adapter:
        return f"adapters, {'TP, PP, VPP, CP, DP, EP, ETP and products' if degrees else 'one process'}"
    if "moe" in case.model or case.model == "mixtral":
        return f"mixture of experts, {'TP, PP, VPP, CP, DP, EP, ETP and products' if degrees else 'one process'}"
    if "recompute" in case.layout:
        return "full and selective recompute, alone and with TP, VPP, CP"
    alone = {
        "tp": "TP",
        "pp": "PP, also uneven stages",
        "cp": "CP",
        "dp_replicate": "DP",
        "dp_shard": "DP, sharded Adam",
    }
    if degrees == {"pp", "vpp"}:
        return "PP and VPP"
    if len(degrees) > 1:
        return "products of TP, PP, VPP, CP, DP"
    return alone[degrees.pop()] if degrees else "one process"


def compare(ranks: Ranks, folder: Path, processes: int, chosen: list[Case]) -> list[Comparison]:
    """Compare chosen cases on Megatron (models: `folder/models`), in processes that start once, with Transformers."""
    torch.set_num_threads(1)
    indices = [cases(processes).index(case) for case in chosen]
    log = folder / f"log-{processes}.txt"
    ranks.run("tests.parity.megatron_program", processes, folder, json.dumps(indices), log=log)
    return [
        Comparison(case, differences(folder, f"{processes}-{index}", case))
        for index, case in zip(indices, chosen, strict=True)
    ]


def differences(folder: Path, name: str, case: Case) -> dict[str, float]:
    result: dict[str, Any] = torch.load(folder / "results" / f"{name}.pt")
    file = "adapter_model.safetensors" if case.adapter else "model.safetensors"
    base, exported = folder / "models" / case.model, folder / "exported" / name
    weights = load_file(exported / file)
    expected = train_plainly(base, case.data, case.everything_decays, case.adapter, case.moe)
    evaluation_loss = loss_of_export(base, exported, case, expected.references)
    if case.moe == "frozen":
        original = load_file(base / file)
        assert all(torch.equal(weights[name], original[name]) for name in original if name.endswith(".gate.weight"))
    has_target = result["greedy"] >= 0
    likeliest = expected.predictions.gather(1, result["greedy"].clamp(min=0)[:, None]).squeeze(1)
    behind = (expected.predictions.amax(1) - likeliest)[has_target]
    losses = [
        *zip(result["losses"], expected.losses, strict=True),
        *zip(result["aux_losses"], expected.aux_losses, strict=True),
        (result["evaluation_loss"], evaluation_loss),
        (result["continued_loss"], evaluation_loss),
    ]
    norms = zip(result["grad_norms"], expected.grad_norms, strict=True)
    return {
        "log_probability": max(largest(result["log_probabilities"], expected.log_probabilities), behind.max().item()),
        "loss": max(abs(one - other) for one, other in losses),
        "grad_norm": max(abs(one - other) / other for one, other in norms),
        "gradient": largest_of_all(result["gradients"], expected.gradients),
        "weight": largest_of_all(weights, expected.weights),
    }


def loss_of_export(base: Path, exported: Path, case: Case, references: list[Tensor]) -> float:
    """Return the loss of the exported model, as Transformers and PEFT read it, on the first global batch.

    Its weights are compared elsewhere. Differences within their bound moved this loss by 1.1e-6 on one kind of CPU.
    """
    model = model_as_compared(base if case.adapter else exported)
    if case.adapter:
        model = peft.PeftModel.from_pretrained(model, exported)
    with torch.no_grad():
        return mean_loss(case.method, document_values(model, global_batches(case.data)[0]), references).item()


def model_as_compared(folder: Path) -> Any:
    """Return a folder's model with Transformers' own attention, in float64.

    In fp32, losses were 1.06e-6 apart on one kind of CPU. Mixtures of experts are in fp32: torch has their grouped
    products in nothing wider.
    """
    dtype = torch.float32 if hasattr(AutoConfig.from_pretrained(folder), "num_experts") else torch.float64
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def largest(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return (one - other).abs().max().item()


def largest_of_all(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(largest(found[name], expected[name]) for name in expected)


@cache
def train_plainly(folder: Path, data: str, everything_decays: bool, adapter: str | None, moe: str | None) -> Expected:
    """Train in a minimal loop, document by document, with Transformers' own attention and PEFT's adapters."""
    model = model_as_compared(folder)
    if adapter:
        model = adapted_by_peft(model, ADAPTERS[adapter])
    asked = MOE.get(moe or "", {})
    for name, parameter in model.named_parameters():
        if asked.get("freeze_router") and name.endswith(".gate.weight"):
            parameter.requires_grad_(False)
    method = "dpo" if data == "pairs" else "sft"
    batches = global_batches(data)
    with torch.no_grad():
        first = torch.stack([torch.cat([token_values(model, document) for document in row]) for row in batches[0]])
        predictions = torch.cat([model(input_ids=torch.tensor([one])).logits[0] for one in batches[0][0]])
        references = [[values.sum() for values in document_values(model, rows)] for rows in batches]
    everything = [{"params": list(model.parameters()), "weight_decay": WEIGHT_DECAY}]
    groups = everything if everything_decays else trainer_parameter_groups(model, WEIGHT_DECAY)
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPSILON)
    if adapter and (ratio := ADAPTERS[adapter].get("loraplus_lr_ratio")):
        optimizer = loraplus_adam(model, ratio)
    losses, aux_losses, norms, gradients = [], [], [], {}
    for rows, reference in zip(batches, references, strict=True):
        loss = mean_loss(method, document_values(model, rows), reference)
        losses.append(loss.item())
        if coefficient := asked.get("aux_loss_coefficient"):
            aux_loss = mean_aux_loss(model, rows)
            aux_losses.append(aux_loss.item())
            loss = loss + coefficient * aux_loss
        loss.backward()
        if not (gradients or adapter):
            gradients = file_names(model, {name: value.grad.clone() for name, value in named(model)})
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM[method]).item())
        optimizer.step()
        optimizer.zero_grad()
    if adapter:
        loss = mean_loss(method, document_values(model, batches[0]), references[0])
        if coefficient := asked.get("aux_loss_coefficient"):
            loss = loss + coefficient * mean_aux_loss(model, batches[0])
        loss.backward()
        gradients = {name.removeprefix("base_model.model."): value.grad.clone() for name, value in named(model)}
    whole = {name: weight.detach() for name, weight in model.named_parameters()}
    weights = adapter_weights(model) if adapter else file_names(model, whole)
    return Expected(first, predictions.log_softmax(1), gradients, losses, norms, weights, references[0], aux_losses)


def adapted_by_peft(model: Any, adapter: dict[str, Any]) -> Any:
    renamed = {"rank": "r", "alpha": "lora_alpha"}
    of_optimizer = {"loraplus_lr_ratio"}
    options = {renamed.get(name, name): value for name, value in adapter.items() if name not in of_optimizer}
    torch.manual_seed(SEED)
    return peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": "all-linear", **options}))


def loraplus_adam(model: Any, ratio: float) -> torch.optim.Optimizer:
    return create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        lr=LEARNING_RATE,
        loraplus_lr_ratio=ratio,
        loraplus_weight_decay=WEIGHT_DECAY,
        weight_decay=WEIGHT_DECAY,
        betas=(0.9, 0.95),
        eps=EPSILON,
    )


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """Return a trained adapter's LoRA factors under the names that PEFT's files use."""
    weights = {name: value.detach().clone() for name, value in peft.get_peft_model_state_dict(model).items()}
    assert all(weight.abs().max() > LEAST_LEARNED for name, weight in weights.items() if ".lora_B." in name)
    return weights


def mean_loss(method: str, documents: list[Tensor], reference: list[Tensor]) -> Tensor:
    if method == "sft":
        return -torch.cat(documents).double().sum() / sum(len(values) - 1 for values in documents)
    ratios = torch.stack([values.sum() for values in documents]) - torch.stack(reference)
    return -functional.logsigmoid(BETA * (ratios[0::2] - ratios[1::2])).mean()


def document_values(model: Any, rows: list[Any]) -> list[Tensor]:
    return [token_values(model, document) for row in rows for document in row]


def token_values(model: Any, document: list[int]) -> Tensor:
    """Return the log-probability of each token's successor in a document; 0 for the last token."""
    ids = torch.tensor([document])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return functional.pad(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1), (0, 1))


def named(model: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in model.named_parameters() if value.grad is not None or value.requires_grad]


def file_names(model: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's weights under the names in its files, in which each expert has weights of its own."""
    return {name: value.clone() for name, value in revert_weight_conversion(model, values).items()}


if __name__ == "__main__":
    main()
