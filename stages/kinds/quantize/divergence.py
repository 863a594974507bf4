"""Comparison of a quantized model's predictions with the unquantized model's, on tokens not used for calibration.

Both are loaded from the folders that a server will get, so a fault of the export shows as well. Perplexity alone would
not do: a model that has learned little "passes" it even at one bit.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from stages.core.errors import ModelError
from stages.engines.recorded import pictures_of
from stages.kinds.quantize.registry import RowPictures
from stages.kinds.quantize.samples import batches
from stages.models.loading import head_of, load_config, load_model, load_tokenizer
from stages.models.model_folder import GGUF_FILE, holds_gguf
from stages.models.processor import MediaProcessor
from stages.models.recorded import Differences, Predicted, RecordedDocument, differences

BATCH_TOKENS = 4096
CHUNK_TOKENS = 512
"""Number of predictions compared at a time, so that float32 [tokens, vocabulary] needs little memory."""
NUM_WORST = 5


@dataclass(order=True, frozen=True)
class TokenDivergence:
    """KL divergence of one prediction, in nats, and the token that actually followed."""

    kl_nats: float
    token: int


@dataclass
class Divergence:
    """Running sums of KL divergence, losses and equal greedy choices, to compare a model with its quantized copy."""

    num_tokens: int = 0
    kl_nats: float = 0.0
    reference_loss_nats: float = 0.0
    quantized_loss_nats: float = 0.0
    num_same_choice: int = 0
    worst: list[TokenDivergence] = field(default_factory=list)
    from_training: Differences | None = None
    """Differences of log-probabilities from those that training recorded; None without a record."""

    def metrics(self) -> dict[str, float]:
        return {
            "kl_nats_per_token": self.kl_nats / self.num_tokens,
            "perplexity_before": _exponential(self.reference_loss_nats / self.num_tokens),
            "perplexity_after": _exponential(self.quantized_loss_nats / self.num_tokens),
            "same_choice_fraction": self.num_same_choice / self.num_tokens,
            **(self.from_training.metrics() if self.from_training else {}),
        }

    def worst_in_words(self, tokenizer_folder: Path) -> str:
        """Return, as text for an error, the tokens whose predictions differ most, with their KL divergence."""
        tokenizer = load_tokenizer(tokenizer_folder)
        return ", ".join(f"{tokenizer.decode([worst.token])!r} ({worst.kl_nats:.3f} nats)" for worst in self.worst)

    def add(self, reference_logits: torch.Tensor, quantized_logits: torch.Tensor, next_tokens: torch.Tensor) -> None:
        """Add both models' predictions, logits [tokens, vocabulary]. next_tokens: the true ones, int64 [tokens]."""
        reference = reference_logits.float().log_softmax(-1)
        quantized = quantized_logits.float().log_softmax(-1)
        kl_nats = (reference.exp() * (reference - quantized)).sum(-1)  # [tokens]: Σ p (ln p - ln q)
        self.num_tokens += len(next_tokens)
        self.kl_nats += kl_nats.sum().item()
        self.reference_loss_nats += torch.nn.functional.nll_loss(reference, next_tokens, reduction="sum").item()
        self.quantized_loss_nats += torch.nn.functional.nll_loss(quantized, next_tokens, reduction="sum").item()
        self.num_same_choice += int((reference.argmax(-1) == quantized.argmax(-1)).sum())
        divergences = (TokenDivergence(*pair) for pair in zip(kl_nats.tolist(), next_tokens.tolist(), strict=True))
        self.worst = heapq.nlargest(NUM_WORST, [*self.worst, *divergences])


def measure_divergence(
    reference_folder: Path,
    quantized_folder: Path,
    samples: list[list[int]],
    evaluated: list[list[bool]],
    *,
    pictures: RowPictures | None = None,
    recorded: Sequence[RecordedDocument] = (),
    trust_remote_code: bool,
    report: Callable[[int, int], None],
) -> Divergence:
    """Run both models on `samples`, and return KL(reference ‖ quantized), exact over the vocabulary.

    evaluated: the tokens of each sample whose prediction counts. pictures: of the samples. recorded: documents with
    predictions of training, which the quantized model runs over, too. report: called as report(done, total), in tokens.
    """
    reference, quantized = (_load(folder, trust_remote_code) for folder in (reference_folder, quantized_folder))
    divergence, total = Divergence(), sum(len(sample) for sample in samples)
    done = 0
    for numbers, given in batches(samples, BATCH_TOKENS, pictures):
        # Flattened to [rows × (tokens − 1)]: logits at a token predict the next one, so the first has no prediction.
        inputs = {name: value.to(reference.device) for name, value in given.items()}
        ids, mask = inputs["input_ids"], torch.tensor([evaluated[number] for number in numbers])
        logits = (_predictions(reference, inputs), _predictions(quantized, inputs), ids[:, 1:].flatten())
        for chunk in mask[:, 1:].flatten().nonzero().flatten().split(CHUNK_TOKENS):
            divergence.add(*(part[chunk.to(ids.device)] for part in logits))
        done += ids.numel()
        report(done, total)
    if recorded:
        processor = None
        if any(document.pictures for document in recorded):
            processor = MediaProcessor(quantized_folder, trust_remote_code=trust_remote_code)
        predicted = [_predicted(quantized, document, processor) for document in recorded]
        divergence.from_training = differences(predicted, recorded)
    return divergence


def _load(folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    accelerator = torch.accelerator.current_accelerator()
    model, loading = load_model(
        folder,
        head=head_of(load_config(folder, trust_remote_code=trust_remote_code)),
        dtype="auto" if accelerator else torch.float32,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        **_of_gguf(folder),
    )
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(
            f"Transformers finds no weights for {', '.join(missing[:NUM_WORST])} in {folder} and would make them up; "
            "choose another method, or leave these layers out with `ignore`"
        )
    if not accelerator:
        # Transformers leaves experts that it unpacked, and what is beside them, in the dtype of the file.
        for parameter in model.parameters():
            if parameter.dtype is torch.bfloat16 or parameter.dtype is torch.float16:
                parameter.data = parameter.data.float()
    return model.to(accelerator or "cpu").eval()


def _of_gguf(folder: Path) -> dict[str, Any]:
    """Return Transformers' arguments to load a GGUF file, dequantized, with the model's config (GGUF lacks sizes)."""
    if not holds_gguf(folder):
        return {}
    config = load_config(folder)
    del config.quantization_config
    return {"gguf_file": GGUF_FILE, "config": config}


@torch.inference_mode()
def _predictions(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run a model; return logits [rows × (tokens − 1), vocabulary] that predict every token but each row's first."""
    return model(**_in_dtype(model, inputs), use_cache=False).logits[:, :-1].flatten(0, 1)


def _in_dtype(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs, of which pictures are in fp32, in the model's dtype."""
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}


@torch.inference_mode()
def _predicted(model: PreTrainedModel, document: RecordedDocument, processor: MediaProcessor | None) -> Predicted:
    targets, ids = torch.tensor(document.targets, device=model.device), document.input_ids
    given = processor.inputs(ids, pictures_of(document, processor)) if processor else {"input_ids": torch.tensor([ids])}
    inputs = {name: value.to(model.device) for name, value in given.items()}
    logits = model(**_in_dtype(model, inputs), use_cache=False).logits[0]
    predictions = logits[targets >= 0].float().log_softmax(1)  # [learned tokens, vocabulary]
    chosen = predictions.gather(1, targets[targets >= 0, None]).squeeze(1)  # [learned tokens]: ln p of each target
    return Predicted(chosen.tolist(), predictions.argmax(1).tolist())


def _exponential(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:  # above 709 nats
        return math.inf
