"""The types of a GGUF file's matrices. One of K-quants holds others, too, where blocks of 256 do not divide rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFReader

from stages.kinds.quantize.k_quants import SMALLER_BLOCKS
from stages.serving.engine import K_BLOCK_SIZE, is_k_quant

NUM_NAMED = 6


@dataclass(frozen=True)
class StoredTypes:
    """matrices: (name in the file, inputs of a row, type) of each tensor that has rows. mix: of the recipe."""

    matrices: tuple[tuple[str, int, str], ...]
    mix: str

    def metrics(self) -> dict[str, float]:
        """Matrices by type; of K-quants, how many have another type than the mix meant."""
        counts = {f"num_matrices_{name.lower()}": float(count) for name, count in self._counts().items()}
        smaller = {"num_matrices_of_smaller_blocks": float(len(self._fallen_back()))} if is_k_quant(self.mix) else {}
        return {**counts, **smaller}

    def in_words(self) -> str:
        """Such as `stored as 12 Q4_K, 3 Q6_K`."""
        return "stored as " + ", ".join(f"{count} {name}" for name, count in self._counts().items())

    def caveats(self) -> Iterator[str]:
        """That some matrices take more bits than was asked for, and which."""
        found = self._fallen_back()
        if not found:
            return
        named = ", ".join(f"{name} ({size} inputs, {stored_as})" for name, size, stored_as in found[:NUM_NAMED])
        more = f" and {len(found) - NUM_NAMED} more" if len(found) > NUM_NAMED else ""
        yield (
            f"{len(found)} of {len(self.matrices)} matrices have rows that blocks of {K_BLOCK_SIZE} do not divide, and "
            f"are stored in a larger type with blocks of 32: {named}{more}"
        )

    def _counts(self) -> Counter[str]:
        counts = Counter(stored_as for _, _, stored_as in self.matrices)
        return Counter(dict(sorted(counts.items())))

    def _fallen_back(self) -> list[tuple[str, int, str]]:
        """A mix of K-quants has no such type but for want of a block."""
        smaller = {one.name for one in SMALLER_BLOCKS.values()}
        return [one for one in self.matrices if is_k_quant(self.mix) and one[2] in smaller]


def stored_types(file: Path, mix: str) -> StoredTypes:
    """What a GGUF file says of its matrices."""
    tensors = (one for one in GGUFReader(file).tensors if len(one.shape) > 1)
    return StoredTypes(tuple((one.name, int(one.shape[0]), one.tensor_type.name) for one in tensors), mix)
