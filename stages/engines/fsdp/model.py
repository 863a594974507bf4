"""Causal language model from a Hugging Face folder, in fp32, which returns log-probabilities of target tokens.

Weights are read at once (`load_model`), or only located (`find_weights`), for every process to read its rows once the
model is sharded (`shards.py`).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from stages.core.errors import LifecycleError, ModelError
from stages.data.batch import Batch
from stages.engines.attention import hidden_states, hidden_states_and_router_logits
from stages.engines.balance import balance_of_logits
from stages.engines.context import TokenSlice
from stages.engines.documents import PackedDocuments
from stages.engines.fsdp.drawn import DrawnDocuments, drawn_documents, without_pictures
from stages.engines.fsdp.expert_choices import ExpertChoices
from stages.engines.fsdp.mtp import call_of_layer, hidden_ahead
from stages.engines.fsdp.packed import packed
from stages.engines.fsdp.probe import LENGTHS, LONG_FROM, Verdict, probe
from stages.engines.fsdp.sources import ModelFiles
from stages.engines.fsdp.tensor_parallel import summed, summed_gradients
from stages.engines.log_probabilities import (
    OutputHead,
    greedy_tokens,
    likeliest_tokens,
    tempered,
    token_log_probabilities,
)
from stages.engines.logits_transform import logits_transform
from stages.engines.mixers import mix_by_document, mixing
from stages.engines.rotary import long_from, rotate_by_document
from stages.models import loading
from stages.models.layers import decoder_of, text_layers
from stages.models.loaded_weights import check_finite
from stages.models.media import MediaKind
from stages.parallel.host_memory import give_back_freed_memory

LARGEST_DIFFERENCE = 1e-3
"""Largest difference from Transformers' log-probabilities, in nats; kernels differ by 1e-6, a lost scale by more."""
KEPT_BYTES = 2**28
"""Freed bytes that the C library may keep of a forward pass on a CPU: giving them back costs time, too."""


class TargetLogProbabilities(nn.Module):
    """Causal language model whose forward pass maps a batch to the log-probabilities of its target tokens.

    It is the root of the FSDP tree, so that the head's weight is gathered while the log-probabilities are computed.
    """

    def __init__(self, causal_lm: Any, verdict: Verdict, drawn: DrawnDocuments | None = None) -> None:
        """Create it around Transformers' model.

        verdict: of the probe that chose the model's attention. drawn: documents with pictures, of a model that sees.
        """
        super().__init__()
        self.causal_lm = causal_lm
        self.verdict = verdict
        self.drawn = drawn
        self.transform = logits_transform(causal_lm)
        self.is_compiled = False
        self.vocabulary_group: dist.ProcessGroup | None = None
        """Processes over which the head's entries are split, where they are."""
        self.left_whole: list[str] = []
        """Matrices of text layers that these processes do not split."""
        self.expert_mesh: DeviceMesh | None = None
        """Processes with the dimensions over which experts are spread and sharded, where they are."""
        self.choices: ExpertChoices | None = None
        """Choices of experts, where they are recorded and replayed."""
        self.context_group: dist.ProcessGroup | None = None
        """Processes over which a micro-batch's tokens are split, where they are."""
        rotate_by_document(decoder_of(causal_lm))
        mix_by_document(text_layers(causal_lm), verdict.mixers)

    def forward(
        self,
        batch: Batch,
        *,
        by_transformers: bool = False,
        balances_experts: bool = False,
        ahead: Batch | None = None,
        **wanted: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the log-probabilities of a batch's target tokens.

        wanted: options of `of_hidden`. by_transformers: use Transformers' own attention and head, for one document.
        balances_experts: also return the loss that balances experts, a scalar: summed over tokens, mean over layers.
        ahead: batch of the next positions, for whose targets the MTP layer's log-probabilities are returned last.
        """
        if by_transformers:
            given = self.drawn.arguments(self.causal_lm, batch) if self.drawn else {"input_ids": batch.inputs.input_ids}
            with mixing(PackedDocuments(batch.documents.lengths, batch.inputs.input_ids.device)):
                output = self.causal_lm(**given, use_cache=False)
            return self.of_logits(output.logits, batch)
        if self.choices:
            # Until the next forward pass: layers that are recomputed choose in this one's backward pass.
            self.choices.replayed = batch.inputs.experts
        decoder = decoder_of(self.causal_lm, sees=self.drawn is not None)
        part = self._part_of(batch)
        options: dict[str, Any] = {"is_compiled": self.is_compiled, "blocks": self.verdict.blocks, "part": part}
        logits: list[Tensor] = []
        absent = without_pictures(self.causal_lm, self.drawn, batch)
        with absent, call_of_layer(self.causal_lm) if ahead else nullcontext() as call:
            if balances_experts:
                hidden, logits = hidden_states_and_router_logits(decoder, batch.inputs, **options)
            else:
                hidden = hidden_states(decoder, batch.inputs, **options)
        outputs = [self.of_hidden(hidden, batch, **wanted)]
        if balances_experts:
            outputs.append(self._balance(logits, batch))
        if ahead and call:
            outputs.append(self.of_hidden(hidden_ahead(self.causal_lm, hidden, ahead, call), ahead))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def of_hidden(self, hidden: Tensor, batch: Batch, *, greedy: bool = False, num_likeliest: int = 0) -> Tensor:
        """Return the target tokens' log-probabilities, float32 [rows, sequence], from the last hidden states; else 0.

        With k candidates their shape is [rows, sequence, 1 + k]. greedy: return the likeliest tokens, int64.
        num_likeliest: number of tokens, for `likeliest_tokens`.
        """
        if hidden.device.type == "cpu":
            # Activations are at their most here, and the logits come on top.
            give_back_freed_memory(KEPT_BYTES)
        module, signal, part = self.causal_lm.get_output_embeddings(), batch.signal, self._part_of(batch)
        transform = tempered(self.transform, signal.temperature)
        weight, bias = module.weight, getattr(module, "bias", None)
        hidden = hidden.to(weight.dtype)  # Mamba gives its states in fp32, as Transformers' own code expects
        if group := self.vocabulary_group:
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()
            hidden = summed_gradients(hidden, group)
        head = OutputHead(weight, bias, transform, group=group, compiles=self.is_compiled)
        # Without candidates no dimension of them: FSDP2 hangs its backward hooks on the output, and cannot rely on them
        # when that is a view.
        whole = signal.targets if signal.candidates is None else signal.wanted
        wanted, positions = part.wanted(signal) if part else (whole, signal.target_positions)
        if greedy:
            values = greedy_tokens(hidden, head, wanted, positions)
        elif num_likeliest:
            values = likeliest_tokens(hidden, head, wanted, positions, number=num_likeliest)
        else:
            values = token_log_probabilities(hidden, head, wanted, positions)
        return part.gathered(values, signal.targets.shape) if part else values

    def _part_of(self, batch: Batch) -> TokenSlice | None:
        """Return the tokens that this process computes, where others compute the rest of a batch."""
        if self.context_group is None:
            return None
        return TokenSlice(self.context_group, batch.documents.lengths, batch.inputs.input_ids.device)

    def _balance(self, logits: list[Tensor], batch: Batch) -> Tensor:
        """Return the loss that balances experts of mixture layers with these logits: summed over rows, their mean."""
        rows, per_token, group = batch.documents.token_rows, self.causal_lm.num_experts_per_tok, self.context_group
        num_rows, part = len(rows), self._part_of(batch)
        if part is None or group is None:
            return torch.stack([balance_of_logits(one, rows, per_token, num_rows) for one in logits]).mean()
        own, add_up = part.of(rows, -1), partial(summed, group=group)
        layers = [balance_of_logits(one, own, per_token, num_rows, add_up) for one in logits]
        return summed(torch.stack(layers).mean(), group)

    def of_logits(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the log-probabilities of one document's target tokens from its logits [1, tokens, vocabulary]."""
        # IGNORED is no index: clamped to token 0, whose value the mask then clears.
        of_targets = logits.float().log_softmax(-1).gather(2, batch.signal.targets.clamp(min=0)[..., None]).squeeze(2)
        return of_targets * batch.signal.has_target


def load_model(
    folder: Path, *, reads_weights: bool, trust_remote_code: bool, sees: Sequence[MediaKind] = ()
) -> TargetLogProbabilities:
    """Load the model of a Hugging Face folder in fp32 on the CPU; without `reads_weights`, weights are undefined.

    sees: kinds of media for which the whole model is loaded; for none, its text part. Raises ModelError when it is no
    causal language model, lacks weights, or does something to its logits that `logits_transform` does not know.
    """
    with _named_errors(folder):
        config, verdict, build, drawn = _how_to_build(folder, trust_remote_code, sees)
        if not reads_weights:
            causal_lm = _with_undefined_weights(loading.build_model(config, **build).eval())
            return TargetLogProbabilities(causal_lm, verdict, drawn)
        causal_lm, info = loading.load_model(
            folder,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that `_check_complete` can name them
            **build,
        )
        _check_complete(folder, info["missing_keys"], [str(entry[0]) for entry in info["mismatched_keys"]])
        embedding, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
        _check_tied(folder, causal_lm, has_untied=head.weight is not embedding.weight)
        check_finite(folder, causal_lm.named_parameters())
        model = TargetLogProbabilities(causal_lm, verdict, drawn)
        check_log_probabilities(model, torch.device("cpu"))
    return model


def find_weights(
    folder: Path, *, trust_remote_code: bool, sees: Sequence[MediaKind] = ()
) -> tuple[TargetLogProbabilities, ModelFiles]:
    """Return the model in fp32 with undefined weights, which take no memory, and the files to read them from later.

    Raises ModelError as `load_model` does, except for what only weights show.
    """
    with _named_errors(folder):
        config, verdict, build, drawn = _how_to_build(folder, trust_remote_code, sees)
        causal_lm = loading.build_model(config, **build).eval()
        files = ModelFiles(folder, deepcopy(causal_lm))
        _check_complete(folder, files.missing, files.mismatched)
        _check_tied(folder, causal_lm, has_untied=files.has_untied())
        causal_lm._weight_conversions = files.conversions
        model = TargetLogProbabilities(_with_undefined_weights(causal_lm), verdict, drawn)
    return model, files


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (LifecycleError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a folder that was never tried makes Transformers raise
        raise ModelError(
            f"loading {folder} as a causal language model: {type(error).__name__}: {error}; fetch the model again, or "
            "take one that Transformers can run"
        ) from error


def _how_to_build(
    folder: Path, trust_remote_code: bool, sees: Sequence[MediaKind]
) -> tuple[Any, Verdict, dict[str, Any], DrawnDocuments | None]:
    """Return the model's config, the probe's verdict, Transformers' arguments to build the model, and drawn pictures.

    Raises ModelError for a model that should see, and has no processor or class for it.
    """
    config = loading.load_config(folder, trust_remote_code=trust_remote_code)
    drawn = drawn_documents(folder, config, sees, trust_remote_code=trust_remote_code) if sees else None
    verdict = probe(config, trust_remote_code=trust_remote_code, drawn=drawn)
    build: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    if drawn:
        # Towers keep Transformers' attention.
        build |= {"head": "pictures", "attn_implementation": {"text_config": verdict.attention}}
    else:
        build["attn_implementation"] = verdict.attention
    return config, verdict, build, drawn


def _with_undefined_weights(causal_lm: Any) -> Any:
    """Move a model from the meta device to the CPU, with weights undefined (and without memory) until written."""
    causal_lm.to_empty(device="cpu")
    # `to_empty` gave tied weights memory of their own.
    causal_lm.tie_weights()
    for weight in causal_lm.state_dict(keep_vars=True).values():
        weight._is_hf_initialized = True  # the mark that Transformers puts on weights that it has read
    causal_lm.initialize_weights()
    return causal_lm


def _check_complete(folder: Path, missing: Collection[str], mismatched: Collection[str]) -> None:
    names = [*sorted(missing), *sorted(mismatched)]
    if names:
        raise ModelError(
            f"loading {folder}: {len(missing)} weights are missing and {len(mismatched)} have another shape "
            f"than config.json says ({', '.join(names[:5])}); fetch or save the model again"
        )


def _check_tied(folder: Path, causal_lm: Any, *, has_untied: bool) -> None:
    """Raise ModelError if the config ties a head that the files hold apart: serving engines would use only one."""
    text = causal_lm.config.get_text_config()
    # Text parts such as Qwen-VL's do not say it; the whole model's config does.
    ties = getattr(text, "tie_word_embeddings", getattr(causal_lm.config, "tie_word_embeddings", False))
    if causal_lm._tied_weights_keys and ties and has_untied:
        raise ModelError(
            f"loading {folder}: its config says `tie_word_embeddings: true`, or leaves it at that, but the files hold "
            "a head that is not the embedding; say false in config.json, or remove the head from the files"
        )


@torch.no_grad()
def check_log_probabilities(model: TargetLogProbabilities, device: torch.device) -> None:
    """Check that two packed documents get the log-probabilities that each gets alone in Transformers.

    model: on `device`, in fp32. Collective where it is sharded. Raises ModelError.
    """
    causal_lm = model.causal_lm.eval()
    # The first document counts as long; the second and last as short, which leaves the frequencies as they were.
    with long_from(decoder_of(causal_lm), LONG_FROM):
        if model.drawn:
            together, alone = model.drawn.batches(torch.float32)[0], model.drawn.alone(torch.float32)
        else:
            vocab_size = causal_lm.config.get_text_config().vocab_size
            documents = (torch.arange(sum(LENGTHS)) % vocab_size).split(LENGTHS)
            together, alone = packed(documents), [packed([document]) for document in documents]
        found = model(together.to(device))[0]
        expected = torch.cat([_by_transformers(model, document.to(device)) for document in alone])
    difference = (found - expected).abs().max().item()
    if not difference < LARGEST_DIFFERENCE:  # also where the difference is NaN
        raise ModelError(
            f"{type(causal_lm).__name__} gives other log-probabilities to packed documents than to each alone "
            f"(by {difference:.2g} nats): its attention, or what it does to its logits, is not known here; this "
            "architecture cannot be trained"
        )


def _by_transformers(model: TargetLogProbabilities, document: Batch) -> Tensor:
    """Return a document's log-probabilities, [tokens], as Transformers' own attention and head compute them."""
    causal_lm = model.causal_lm
    text = causal_lm.config.get_text_config()
    attn_implementation = text._attn_implementation
    # Transformers' plain matrix products, as reference
    causal_lm.set_attn_implementation({"text_config": "eager"} if model.drawn else "eager")
    given: Tensor = model(document, by_transformers=True)[0]
    causal_lm.set_attn_implementation({"text_config": attn_implementation} if model.drawn else attn_implementation)
    return given
