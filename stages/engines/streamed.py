"""Forward passes in fp32 of a model on disk, loaded one module at a time (Transformers' disk offloading)."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from stages.adapters.adapter import Adapter
from stages.core.errors import ModelError
from stages.engines.logits_transform import logits_transform
from stages.engines.recorded import pictures_of
from stages.engines.rotary import rotates_by_document_length
from stages.models.layers import decoder_of
from stages.models.loading import build_model, head_of, load_config, load_model
from stages.models.parts import towers_of
from stages.models.processor import MediaProcessor
from stages.models.recorded import Predicted, RecordedDocument

CHUNK_LOGITS = 2**25
"""Number of fp32 logits in memory at a time: they take 128 MiB."""


class StreamedModel:
    """Causal language model whose weights stay on disk and are read module by module in a forward pass."""

    def __init__(
        self,
        folder: Path,
        scratch: Path,
        *,
        trust_remote_code: bool,
        from_disk: bool = True,
        processor: Path | None = None,
    ) -> None:
        """Open the model in `folder` without its weights; ModelError. scratch: for weights in unusable stored form.

        from_disk: False for a small model, whose weights are loaded at once. processor: folder of the one that reads
        documents with media, and may bound pictures otherwise; by default the model's own.
        """
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            config = load_config(folder, trust_remote_code=trust_remote_code)
            places = _on_disk(config, trust_remote_code) | {"offload_folder": scratch} if from_disk else {}
            self.causal_lm: Any = load_model(
                folder,
                head=head_of(config),
                dtype=torch.float32,
                **places,
                trust_remote_code=trust_remote_code,
            ).eval()
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise ModelError(f"loading {folder}, to compare it with what training recorded: {error}") from error
        self._processor_folder = processor or folder
        self._trust_remote_code = trust_remote_code
        self._transform = logits_transform(self.causal_lm)

    def ordered(self, adapter_layers: set[str]) -> list[str]:
        """Return adapted layers in the model's order; raise ModelError for layers that it lacks."""
        ordered = [name for name, _ in self.causal_lm.named_modules() if name in adapter_layers]
        if lost := sorted(adapter_layers - set(ordered)):
            raise ModelError(
                f"the adapter is of {', '.join(lost[:5])}, which {type(self.causal_lm).__name__} does not have; "
                "they do not belong together"
            )
        return ordered

    def put_beside(self, adapter: Adapter) -> None:
        """Add an adapter by forward hooks to a model read from disk: adapted layers then give W x + scaling B A x."""
        for layer in self.ordered(set(adapter.factors)):
            self.causal_lm.get_submodule(layer).register_forward_hook(partial(_add, adapter, layer))

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens whose logits may be in memory at a time, so that they take at most 128 MiB."""
        return max(1, CHUNK_LOGITS // self.causal_lm.get_output_embeddings().weight.shape[0])

    @torch.no_grad()
    def hidden_states(self, documents: Sequence[RecordedDocument]) -> Tensor:
        """Return the last hidden states at all target tokens, [targets, width].

        One pass over the weights serves all documents of text; each with pictures is alone.
        """
        sees = any(document.pictures for document in documents)
        decoder = decoder_of(self.causal_lm, sees=sees)
        rows = [torch.tensor(document.input_ids) for document in documents]
        # One batch for all documents reads the weights from disk once. Padding follows each document, and causal
        # attention never sees it; but angles that depend on the longest text must be computed for each alone.
        if sees:
            processor = MediaProcessor(self._processor_folder, trust_remote_code=self._trust_remote_code)
            given = [processor.inputs(document.input_ids, pictures_of(document, processor)) for document in documents]
        elif rotates_by_document_length(decoder):
            given = [{"input_ids": row[None]} for row in rows]
        else:
            given = [{"input_ids": pad_sequence(rows, batch_first=True)}]
        hidden = [state for inputs in given for state in decoder(**inputs, use_cache=False)[0]]
        selected = [
            state[: len(row)][torch.tensor(document.targets) >= 0]  # [targets, width]; IGNORED is negative
            for state, row, document in zip(hidden, rows, documents, strict=True)
        ]
        return torch.cat(selected)

    def predictions(self, documents: Sequence[RecordedDocument]) -> list[Predicted]:
        """Return the log-probability of each document's target tokens, and the likeliest token at each target."""
        targets = targets_of(documents).split(self.chunk_tokens)
        chosen, greedy = [], []
        for states, expected in zip(self.hidden_states(documents).split(self.chunk_tokens), targets, strict=True):
            row = self.log_probabilities(states)
            chosen.append(row.gather(1, expected[:, None]).squeeze(1))
            greedy.append(row.argmax(1))
        return by_document(torch.cat(chosen), torch.cat(greedy), documents)

    @torch.no_grad()
    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Return log-probabilities of the whole vocabulary from hidden states: fp32 [tokens, vocabulary]."""
        logits = self.causal_lm.get_output_embeddings()(hidden).float()
        return self._transform(logits).log_softmax(1)


def _on_disk(config: Any, trust_remote_code: bool) -> dict[str, Any]:
    """Return Transformers' argument that leaves a model's modules on disk, but for a tower of sounds.

    Such towers take their inputs to the device of their weights by themselves, which on disk is none.
    """
    if head_of(config) == "tokens":
        return {"device_map": {"": "disk"}}
    model = build_model(config, head="pictures", trust_remote_code=trust_remote_code)
    hearing = towers_of(model).get("audio_tower")
    return {"device_map": _places(model, hearing) if hearing else {"": "disk"}}


def _places(module: nn.Module, in_memory: nn.Module, name: str = "") -> dict[str, str]:
    """Return the place of each part of a module, by name, where one of its modules is in memory."""
    if module is in_memory or in_memory not in {*module.modules()}:
        return {name: "cpu" if module is in_memory else "disk"}
    children = {f"{name}.{child}".lstrip("."): one for child, one in module.named_children()}
    own = {f"{name}.{one}".lstrip("."): "disk" for one, _ in module.named_parameters(recurse=False)}
    return own | {at: place for child, one in children.items() for at, place in _places(one, in_memory, child).items()}


def targets_of(documents: Sequence[RecordedDocument]) -> Tensor:
    """Return the target tokens of all documents one after the other, int64 [targets]."""
    return torch.tensor([target for one in documents for target in one.targets if target >= 0])


def by_document(log_probabilities: Tensor, greedy: Tensor, documents: Sequence[RecordedDocument]) -> list[Predicted]:
    """Split the log-probabilities (fp32) and likeliest tokens (int64) of all documents' targets by document."""
    counts = [one.num_targets for one in documents]
    parts = zip(log_probabilities.split(counts), greedy.split(counts), strict=True)
    return [Predicted(values.tolist(), tokens.tolist()) for values, tokens in parts]


def _add(adapter: Adapter, layer: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    a, b = adapter.factors[layer]
    # Two narrow products; B A would be a matrix as large as the layer's weight.
    return output + adapter.scaling_of(layer) * (inputs[0] @ a.float().T) @ b.float().T
