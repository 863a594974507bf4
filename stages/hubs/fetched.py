"""Base config of stages that download models or datasets."""

from abc import abstractmethod
from typing import ClassVar

from stages.core.contract import StageConfig
from stages.hubs.hub import Request, Source


class FetchedConfig(StageConfig):
    """Base config of stages that download a model or dataset, named by one of two fields, from outside the store.

    Where such a stage ends a chain of references, plans look for the model's config, its rows and its files.
    """

    WAITS_FOR_GPUS: ClassVar[bool] = False

    @property
    @abstractmethod
    def source(self) -> Source:
        """Source of the model or dataset, parsed from the config."""

    @property
    @abstractmethod
    def request(self) -> Request:
        """Request to the hub: the model or dataset, and which of its files to download."""

    @property
    @abstractmethod
    def leaves_files(self) -> bool:
        """True if a dataset's files stay remote, so that its artifact holds only their addresses (pointers)."""
