"""What a merged model gives beside what it is to give: to the documents that training recorded, over all tokens.

Models run from their files, one module at a time (Transformers' offloading to disk), in fp32: neither is ever in memory
as a whole. The adapter stands beside its base in the one, and is part of the weights in the other, so that only
rounding tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from stages.adapters.adapter import Adapter
from stages.core.errors import ModelError
from stages.engines.fsdp.model import decoder_of
from stages.engines.log_probabilities import LogitsTransform, logits_transform
from stages.engines.rotary import rotates_by_document_length
from stages.models.recorded import Predicted, RecordedDocument

CHUNK_LOGITS = 2**25
"""fp32 logits of either model alive at a time: 128 MiB."""


@dataclass(frozen=True)
class Comparison:
    """`given`: what the merged model predicts of each document; `expected`: what its base does with the adapter beside
    it, from which KL and greedy choices are counted, over all targets."""

    documents: list[RecordedDocument]
    given: list[Predicted]
    expected: list[Predicted] | None = None
    kl_nats_per_token: float = 0.0
    same_choice_fraction: float = 1.0

    @property
    def expected_documents(self) -> list[RecordedDocument]:
        """The documents with what they are expected to have, in place of what was recorded."""
        assert self.expected is not None, "of a mixture, which is compared with its parts"
        return [
            replace(
                document,
                log_probability=math.fsum(one.log_probabilities),
                log_probabilities=list(one.log_probabilities),
                greedy=list(one.greedy),
            )
            for document, one in zip(self.documents, self.expected, strict=True)
        ]

    def metrics(self) -> dict[str, float]:
        """Under the names that a quantization has for them, too."""
        if self.expected is None:
            return {}
        return {"kl_nats_per_token": self.kl_nats_per_token, "same_choice_fraction": self.same_choice_fraction}


class StreamedModel:
    """A causal language model that stays in its files."""

    def __init__(self, folder: Path, scratch: Path, *, trust_remote_code: bool) -> None:
        """scratch: for what is stored in another form than it is computed in. Raises ModelError."""
        disable_progress_bar()
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            self.causal_lm: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                device_map={"": "disk"},
                offload_folder=scratch,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
            ).eval()
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise ModelError(f"loading {folder}, to compare it with what training recorded: {error}") from error
        self._transform: LogitsTransform | None = logits_transform(self.causal_lm.config)

    def ordered(self, adapter_layers: set[str]) -> list[str]:
        """Layers in the order of the model. Raises ModelError for those that it does not have."""
        ordered = [name for name, _ in self.causal_lm.named_modules() if name in adapter_layers]
        if lost := sorted(adapter_layers - set(ordered)):
            raise ModelError(
                f"the adapter is of {', '.join(lost[:5])}, which {type(self.causal_lm).__name__} does not have; "
                "they do not belong together"
            )
        return ordered

    def put_beside(self, adapter: Adapter) -> None:
        """Let each adapted layer give W x + scaling B A x."""
        for layer in self.ordered(set(adapter.factors)):
            self.causal_lm.get_submodule(layer).register_forward_hook(partial(_add, adapter, layer))

    @property
    def chunk_tokens(self) -> int:
        """How many tokens' logits may be alive at a time."""
        return max(1, CHUNK_LOGITS // self.causal_lm.get_output_embeddings().weight.shape[0])

    @torch.no_grad()
    def hidden_states(self, documents: Sequence[RecordedDocument]) -> Tensor:
        """[targets of all documents, width]: what the head is given, in one pass over the files."""
        decoder = decoder_of(self.causal_lm)
        rows = [torch.tensor(one.input_ids) for one in documents]
        together = [rows] if not rotates_by_document_length(decoder) else [[row] for row in rows]
        hidden = [
            state
            for batch in together
            for state in decoder(input_ids=pad_sequence(batch, batch_first=True), use_cache=False)[0]
        ]
        selected = [
            state[: len(row)][torch.tensor(one.targets) >= 0]
            for state, row, one in zip(hidden, rows, documents, strict=True)
        ]
        return torch.cat(selected)

    @torch.no_grad()
    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """fp32 [tokens, vocabulary]."""
        logits = self.causal_lm.get_output_embeddings()(hidden).float()
        return (self._transform(logits) if self._transform else logits).log_softmax(1)


def compare(given: StreamedModel, expected: StreamedModel | None, documents: Sequence[RecordedDocument]) -> Comparison:
    """The merged model, and its base with the adapter beside it where that is to be had. KL(expected ‖ given)."""
    counts = [one.num_targets for one in documents]
    targets = torch.tensor([target for one in documents for target in one.targets if target >= 0])
    models = [given, *([expected] if expected else [])]
    hidden = [model.hidden_states(documents) for model in models]
    values: list[list[Tensor]] = [[] for _ in models]
    greedy: list[list[Tensor]] = [[] for _ in models]
    kl_nats = 0.0
    for chunk in torch.arange(len(targets)).split(given.chunk_tokens):
        rows = [model.log_probabilities(state[chunk]) for model, state in zip(models, hidden, strict=True)]
        for number, row in enumerate(rows):
            values[number].append(row.gather(1, targets[chunk, None]).squeeze(1))
            greedy[number].append(row.argmax(1))
        q, p = rows[0], rows[-1]
        kl_nats += (p.exp() * (p - q)).sum().item()
    predicted = [
        _of_documents(torch.cat(of_model), torch.cat(chosen), counts)
        for of_model, chosen in zip(values, greedy, strict=True)
    ]
    same = (torch.cat(greedy[0]) == torch.cat(greedy[-1])).float().mean().item()
    return Comparison(list(documents), predicted[0], predicted[1] if expected else None, kl_nats / len(targets), same)


def _of_documents(log_probabilities: Tensor, greedy: Tensor, counts: list[int]) -> list[Predicted]:
    parts = zip(log_probabilities.split(counts), greedy.split(counts), strict=True)
    return [Predicted(values.tolist(), tokens.tolist()) for values, tokens in parts]


def _add(adapter: Adapter, layer: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    a, b = adapter.factors[layer]
    return output + adapter.scaling * (inputs[0] @ a.float().T) @ b.float().T
