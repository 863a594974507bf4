"""Sounds as a model's processor takes them: samples at its rate, of which it makes a spectrogram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.errors import ModelError
from stages.models.media import MediaError, Sound, SoundSize
from stages.models.processed.kind import AskedProcessor, Device, Noise, ProcessedKind
from stages.models.tower import SPECTROGRAM, num_frames

if TYPE_CHECKING:
    from torch import Tensor

ENDS_A_SECOND = 40
"""Part of a second, as 1 / 40, at the end of a sound by which it is found whether a processor takes all of it."""


class Sounds(ProcessedKind[SoundSize]):
    """Sounds of one channel. Their patches are frames of spectrograms."""

    kind = "audio"
    drawn_sizes = (SoundSize(16000, 16000), SoundSize(6000, 8000))
    smallest = SoundSize(1600, 16000)
    sizes_suffice = False  # extractors count what NumPy holds

    def __init__(self, folder: Path, processor: Any) -> None:
        super().__init__(folder, processor)
        self._taken_whole = 0

    def taken(self, _size: SoundSize) -> int:
        return self._rate

    @property
    def _rate(self) -> int:
        """Samples a second that the model takes; raises ModelError if it takes no sounds."""
        if self.part is None:
            raise ModelError(f"the processor in {self.folder} takes no sounds; take a model that hears")
        return int(self.part.sampling_rate)

    def drawn(self, size: SoundSize, noise: Noise) -> Sound:
        import numpy as np

        return Sound(size, noise(size.num_samples_at(self._rate)).astype(np.float32) / 128 - 1, self._rate)

    def content(self, medium: Sound) -> Any:
        return medium.samples

    def blank(self, size: SoundSize, _device: Device) -> Any:
        import torch

        return torch.zeros(size.num_samples_at(self._rate)).numpy()

    def arguments(self, media: Sequence[tuple[SoundSize, Any]]) -> dict[str, Any]:
        return {"audio": [content for _, content in media], "audio_kwargs": {"sampling_rate": self._rate}}

    def check_whole(self, size: SoundSize, processor: AskedProcessor) -> None:
        """Raise MediaError as the base class says.

        Where a second more has more tokens, nothing is cut; else features tell whether the last samples matter.
        """
        if size.num_samples_at(self._rate) <= self._taken_whole:
            return
        longer = replace(size, num_samples=size.num_samples + size.sample_rate)
        texts = [processor.written((one,))[0] for one in (size, longer)]
        if len(texts[0]) == len(texts[1]):
            drawn = processor.drawn(size)
            assert isinstance(drawn, Sound)
            ending = drawn.samples.copy()
            ending[-self._rate // ENDS_A_SECOND :] *= -0.5
            usual, other = (processor.features([one]) for one in (drawn, replace(drawn, samples=ending)))
            if all(value.equal(other[name]) for name, value in usual.items()):
                raise MediaError(
                    f"has {size.seconds:,.1f} seconds, of which the model's processor takes the first alone; cut it"
                )
        self._taken_whole = size.num_samples_at(self._rate)

    def patches(self, _size: SoundSize, outputs: Mapping[str, Any], _config: Any) -> tuple[int, ...]:
        return (self._num_frames(outputs[SPECTROGRAM]),)

    def counted(self, features: Sequence[Mapping[str, Tensor]]) -> list[int]:
        """Return those of all spectrograms, which are not made again to be counted."""
        heard = [one[SPECTROGRAM] for one in features if SPECTROGRAM in one]
        return [number for one in heard for number in [self._num_frames(one[:1])] * len(one)]

    def _num_frames(self, spectrograms: Tensor) -> int:
        return num_frames(spectrograms.shape, self.part.feature_size)
