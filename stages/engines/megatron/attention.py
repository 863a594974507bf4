"""Attention over packed documents in Megatron's layers: rotary positions, document boundaries, context parallelism.

Megatron hands queries, keys and values of its tokens to a *core attention*, together with `PackedTokens`, which holds
the borders of documents and the angles of rotation. There are two:

- `LocalAttention` needs torch alone, by the kernels of the FSDP engine (`stages.engines.attention_kernels`). Under
  context parallelism keys and values of all ranks are gathered. (Megatron's own local attention refuses both packing
  and context parallelism.)
- `TransformerEngineAttention` hands the same to Transformer Engine's fused kernels, with their ring exchange.

Rotation happens here too, with angles that are computed once a micro-batch by Transformers' own module, so that every
`rope_type` (Llama 3's, YaRN, …) is the one that the model was made with. Megatron's packed rotation would split the
tokens by document and compute sines again in every layer.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from stages.engines.attention_kernels import AttentionOptions, attend
from stages.engines.documents import PackedDocuments, place_tokens
from stages.engines.megatron.kernels import Rotation


@dataclass
class PackedTokens(PackedSeqParams):
    """Tokens of one micro-batch on one context-parallel rank, as one sequence [tokens, 1, …], with their positions.

    `qkv_format` stays None: only Megatron's own packed rotation, which is not used, depends on it.
    """

    documents: PackedDocuments | None = None
    """All documents of the micro-batch; under context parallelism padded so that each splits evenly over the ranks."""
    cosines: Tensor | None = None
    """Cosines of the rotary angles of this rank's tokens, [1, tokens, head width]."""
    sines: Tensor | None = None
    places: Tensor | None = None
    """Index of each token among all documents, for every context-parallel rank: int64 [ranks, tokens of a rank]."""
    rows: Tensor | None = None
    """Index of the micro-batch's row that each token is in, int64 [tokens]; -1 in padding."""
    num_rows: int = 0


class LocalAttention(nn.Module):
    """Megatron core attention over packed documents that needs only torch's kernels."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **unused: Any) -> None:
        """Create the attention of one layer. unused: arguments that Megatron passes to its own kernels."""
        super().__init__()
        self.softmax_scale = softmax_scale
        self.window_tokens = window_tokens(config)
        self.context_group: dist.ProcessGroup = parallel_state.get_context_parallel_group()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, *, packed_seq_params: PackedTokens, **unused: Any
    ) -> Tensor:
        """Return differentiable attention over packed documents, [tokens, 1, heads × head width]; the mask is theirs.

        `query` is [tokens, 1, heads, head width], keys and values have fewer heads.
        """
        tokens = packed_seq_params
        query, key = rotate(query, key, tokens)
        assert tokens.documents is not None and tokens.places is not None
        if self.context_group.size() > 1:
            # Rotated before: a gathered key has its position in it already. In the order of the ranks' tokens …
            gathered = (
                gather_from_sequence_parallel_region(states.contiguous(), group=self.context_group)
                for states in (key, value)
            )
            # … then in that of the documents.
            order = tokens.places.flatten()
            key, value = (place_tokens(states, order, len(order)) for states in gathered)
        options = AttentionOptions(self.softmax_scale, window_tokens=self.window_tokens)
        output = attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), tokens.documents, options)
        return output.flatten(1).unsqueeze(1)  # [tokens, heads, head width] → [tokens, 1, heads × head width]


def rotate(query: Tensor, key: Tensor, tokens: PackedTokens) -> tuple[Tensor, Tensor]:
    """Apply rotary positions to queries and keys [tokens, 1, heads, head width], each token by its angle."""
    assert tokens.cosines is not None and tokens.sines is not None
    # [1, tokens, width] → [tokens, 1, 1, width], the same for all heads
    cosines, sines = (factor.to(query.dtype).transpose(0, 1).unsqueeze(2) for factor in (tokens.cosines, tokens.sines))
    return Rotation.apply(query, cosines, sines), Rotation.apply(key, cosines, sines)


def window_tokens(config: Any) -> int | None:
    """Return the size of the sliding attention window in tokens, the token itself included; None: no window."""
    # Megatron counts the tokens before, as flash attention does.
    return None if config.window_size is None else config.window_size[0] + 1


def transformer_engine_attention() -> type[nn.Module]:
    """Return the class of core attention on Transformer Engine's kernels, which must be installed."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class TransformerEngineAttention(TEDotProductAttention):
        """Megatron core attention on Transformer Engine (format `thd`): rotary positions, attention by document."""

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: None = None,
            attn_mask_type: Any = None,
            attention_bias: None = None,
            packed_seq_params: PackedTokens | None = None,
        ) -> Tensor:
            """Return attention over packed documents, [tokens, 1, heads × head width]."""
            assert packed_seq_params is not None and packed_seq_params.documents is not None
            query, key = rotate(query, key, packed_seq_params)
            documents = packed_seq_params.documents
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=documents.boundaries,
                cu_seqlens_kv=documents.boundaries,
                max_seqlen_q=documents.longest,
                max_seqlen_kv=documents.longest,
            )
            states = (part.squeeze(1) for part in (query, key, value))  # [tokens, heads, head width]
            output = super().forward(*states, None, attn_mask_type, packed_seq_params=packed)
            return output.reshape(len(output), 1, -1)  # [tokens, 1, heads × head width]

    return TransformerEngineAttention
