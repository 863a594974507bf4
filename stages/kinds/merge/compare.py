"""What a merged model gives beside what it is to give: to the documents that training recorded, over all tokens.

Both run from their files, in fp32. The adapter stands beside its base in the one, and is part of the weights in the
other, so that only rounding tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.engines.streamed import StreamedModel, by_document, targets_of
from stages.models.recorded import Predicted, RecordedDocument


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
        return [document.recording(one) for document, one in zip(self.documents, self.expected, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Under the names that a quantization has for them, too."""
        if self.expected is None:
            return {}
        return {"kl_nats_per_token": self.kl_nats_per_token, "same_choice_fraction": self.same_choice_fraction}


def compare(given: StreamedModel, expected: StreamedModel | None, documents: Sequence[RecordedDocument]) -> Comparison:
    """The merged model, and its base with the adapter beside it where that is to be had. KL(expected ‖ given)."""
    targets = targets_of(documents)
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
        by_document(torch.cat(of_model), torch.cat(chosen), documents)
        for of_model, chosen in zip(values, greedy, strict=True)
    ]
    same = (torch.cat(greedy[0]) == torch.cat(greedy[-1])).float().mean().item()
    return Comparison(list(documents), predicted[0], predicted[1] if expected else None, kl_nats / len(targets), same)
