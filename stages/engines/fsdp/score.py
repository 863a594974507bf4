"""Reward model: a causal language model whose head gives one number per document instead of logits.

Written as Transformers' sequence classification with one label, taken at the last token that is no padding.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.core.errors import ModelError
from stages.data.batch import Batch, ModelInputs
from stages.engines.export import ScoreHead
from stages.engines.fsdp.model import TargetLogProbabilities
from stages.engines.fsdp.probe import Verdict
from stages.models.loading import build_model, class_with_head, load_tokenizer

WRITTEN_AS = "score.weight"


class DocumentScores(TargetLogProbabilities):
    """Reward model whose forward pass returns each document's score at its last token, and 0 elsewhere."""

    def __init__(self, causal_lm: Any, verdict: Verdict, padding_token: int | None) -> None:
        """Create it around a model whose output head gives one number. verdict: of the probe of its architecture."""
        super().__init__(causal_lm, verdict)
        self._padding_token = padding_token

    def of_hidden(self, hidden: Tensor, batch: Batch, *, greedy: bool = False, num_likeliest: int = 0) -> Tensor:
        """Return the scores from the last hidden states, float32 [rows, sequence], 0 but at documents' last tokens."""
        assert not greedy and not num_likeliest, "there is no vocabulary"
        return self.of_logits(self.causal_lm.get_output_embeddings()(hidden), batch)

    def of_logits(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the scores from the head's output [rows, tokens, 1] as [rows, tokens], 0 but at last tokens."""
        return torch.where(self._is_last(batch.inputs), logits.float().squeeze(-1), 0.0)

    def _is_last(self, inputs: ModelInputs) -> Tensor:
        """Return a mask, bool [rows, sequence]: True at each document's last token that is not the padding token."""
        documents, numbers = inputs.documents, inputs.documents.ids.flatten()
        places = torch.arange(len(numbers), device=numbers.device)
        counted = numbers < documents.count
        if self._padding_token is not None:
            counted &= inputs.input_ids.flatten() != self._padding_token
        # [documents]: the last counted place of each; -1 for padding, and for a document of padding tokens alone
        last = places.new_full((len(documents.lengths),), -1)
        last = last.scatter_reduce(0, numbers, torch.where(counted, places, -1), "amax")
        # [tokens] → [rows, sequence]
        return (places == last[numbers]).view(inputs.input_ids.shape) & (documents.ids < documents.count)


def with_score_head(model: TargetLogProbabilities, folder: Path, seed: int) -> tuple[DocumentScores, ScoreHead]:
    """Return the model with a new score head, drawn from the seed, and the head's description for export.

    Raises ModelError for an architecture that Transformers has no sequence classification for.
    """
    causal_lm = model.causal_lm
    head = ScoreHead(_head_name(causal_lm), WRITTEN_AS, _config_fields(causal_lm, folder))
    text = causal_lm.config.get_text_config()
    generator = torch.Generator().manual_seed(seed)
    score = nn.Linear(causal_lm.get_output_embeddings().weight.shape[1], 1, bias=False)
    nn.init.normal_(score.weight, std=getattr(text, "initializer_range", 0.02), generator=generator)
    causal_lm.set_output_embeddings(score)
    # A head of one row cannot be tied; the export would leave a tied weight out.
    causal_lm.all_tied_weights_keys = {}
    _check_names(causal_lm, head)
    return DocumentScores(causal_lm, model.verdict, head.config["pad_token_id"]), head


def _head_name(causal_lm: Any) -> str:
    weight = causal_lm.get_output_embeddings().weight
    names = [name for name, one in causal_lm.named_parameters(remove_duplicate=False) if one is weight]
    embedded = {name for name, one in causal_lm.base_model.named_parameters(causal_lm.base_model_prefix)}
    return next(name for name in names if name not in embedded)


def _config_fields(causal_lm: Any, folder: Path) -> dict[str, Any]:
    """Return the config.json fields that make Transformers load the model as a classifier with one label."""
    written = class_with_head(causal_lm.config, "score")
    if written is None:
        raise ModelError(
            f"training a reward model: Transformers has no sequence classification for {type(causal_lm).__name__}; "
            "take a model of another family, such as Qwen3 or Llama"
        )
    found = load_tokenizer(folder).pad_token_id
    padding_token = causal_lm.config.get_text_config().pad_token_id if found is None else found
    return {
        "architectures": [written.__name__],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": padding_token,
    }


def _check_names(causal_lm: Any, head: ScoreHead) -> None:
    """Raise ModelError unless the written weights have the names that Transformers' sequence classification reads."""
    expected = set(build_model(deepcopy(causal_lm.config), head="score").state_dict())
    written = {head.written_as if name == head.name else name for name in causal_lm.state_dict()}
    if written != expected:
        raise ModelError(
            f"training a reward model: {type(causal_lm).__name__} has weights that its sequence classification has "
            f"not, or the other way round ({', '.join(sorted(written ^ expected)[:5])}); take another model"
        )
