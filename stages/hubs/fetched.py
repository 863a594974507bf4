"""Base config of stages that fetch models or datasets from outside."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from stages.core.contract import StageConfig
from stages.hubs.hub import Request, Source


class FetchedConfig(StageConfig):
    """Base config of stages that fetch their product, such as a model or a dataset, from outside the store.

    The product is named by the field that names the source.

    Where such a stage ends a chain of references, plans look for the model's config, its rows and its files.
    """

    WAITS_FOR_GPUS: ClassVar[bool] = False

    @property
    @abstractmethod
    def source(self) -> Source:
        """Parsed source of the model or dataset that a stage fetches."""

    @property
    @abstractmethod
    def request(self) -> Request:
        """Request to the hub: source, product and file patterns."""

    @property
    @abstractmethod
    def leaves_files(self) -> bool:
        """True if a dataset's files stay at their source, and the artifact only points to them."""
