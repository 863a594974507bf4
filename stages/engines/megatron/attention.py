"""Attention over packed documents in Megatron's layers: rotary positions, document boundaries, context parallelism.

Megatron hands queries, keys and values of its tokens to a *core attention*, together with `PackedTokens`, which holds
the borders of documents and the angles of rotation. There are two:

- `LocalAttention` needs torch alone. Whole documents: the kernels of the FSDP engine (`stages.engines.attention`).
  Under context parallelism: keys and values of all ranks are gathered, and a mask of positions and document numbers
  decides what a token sees. (Megatron's own local attention refuses both packing and context parallelism.)
- `TransformerEngineAttention` hands the same to Transformer Engine's fused kernels, with their ring exchange.

Rotation happens here too, with angles that are computed once a micro-batch by Transformers' own module, so that every
`rope_type` (Llama 3's, YaRN, …) is the one that the model was made with. Megatron's packed rotation would split the
tokens by document and compute sines again in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.nn import functional

from stages.engines.attention import packed_attention
from stages.engines.documents import PackedDocuments
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
    positions: Tensor | None = None
    """Position of each token in its document, for every context-parallel rank: int64 [ranks, tokens of a rank]."""
    document_ids: Tensor | None = None
    """Index of the document of each token, for every context-parallel rank: int64 [ranks, tokens of a rank]."""
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
        if self.context_group.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(states.contiguous(), group=self.context_group)
                for states in (key, value)
            )
            # Rotated before: a gathered key has its position in it already.
            return self._masked(query, key, value, tokens)
        # Megatron's [tokens, 1, heads, head width] → Transformers' [1, heads, tokens, head width]
        states = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        output, _ = packed_attention(
            self, *states, None, tokens.documents, scaling=self.softmax_scale, sliding_window=self.window_tokens
        )
        return output.flatten(2).transpose(0, 1)  # [1, tokens, heads, head width] → [tokens, 1, heads × head width]

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, tokens: PackedTokens) -> Tensor:
        # keys and values are of all ranks' tokens
        queries, keys, values = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        output = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=self._visible(tokens),
            scale=self.softmax_scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return output.permute(2, 0, 1, 3).flatten(2)  # [1, heads, tokens, …] → [tokens, 1, heads × head width]

    def _visible(self, tokens: PackedTokens) -> Tensor:
        """Return the mask, bool [tokens, tokens of all ranks]: True where a token of this rank may see another."""
        assert tokens.positions is not None and tokens.document_ids is not None
        rank = self.context_group.rank()
        # `tokens.positions` [ranks, tokens] flattened is in the order of the ranks, as the gathered keys are.
        own_positions, own_ids = tokens.positions[rank, :, None], tokens.document_ids[rank, :, None]
        distance = own_positions - tokens.positions.flatten()  # [tokens, 1] - [tokens of all ranks]
        # Padding is a document of its own: its tokens see each other, so that no row of the mask is empty.
        visible = (distance >= 0) & (own_ids == tokens.document_ids.flatten())
        return visible if self.window_tokens is None else visible & (distance < self.window_tokens)


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
