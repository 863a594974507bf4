"""An engine that puts no adapters on a model, and takes no other weights while it runs: that half of the protocol."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stages.core.errors import ModelError, RecipeError
from stages.models.projections import Projection
from stages.serving.launch import LaunchSpec
from stages.serving.quantization import Quantization

if TYPE_CHECKING:
    from stages.serving.backend import EngineAddress
    from stages.serving.client import Client


class FixedWeights:
    """Recipes that ask for more are refused by `Capabilities` when they are read; these are the last line."""

    title: str

    def program_in_image(self, *, on_cpu: bool) -> NoReturn:
        raise RecipeError(f"serving with {self.title} in Kubernetes: there is no image of it; serve with vllm")

    def check_adapters(self, spec: LaunchSpec) -> None:
        self._refuse_adapters()

    def has_room(self, spec: LaunchSpec, adapter: Path) -> bool:
        return False

    def load_adapter(self, address: EngineAddress, api_key: str, name: str, folder: Path, timeout_s: float) -> None:
        self._refuse_adapters()

    def unload_adapter(self, address: EngineAddress, api_key: str, name: str, timeout_s: float) -> None:
        self._refuse_adapters()

    def check_takes_weights(self, client: Client, num_tokens: int, dtype: str) -> None:
        self._refuse_reloads()

    def check_reads(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        self._refuse_reloads()

    def prepare_reloads(self, folder: Path, client: Client | None = None) -> None:
        self._refuse_reloads()

    def reload_weights(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        self._refuse_reloads()

    def check_loadable(
        self, model_config: dict[str, Any], projections: list[Projection], quantization: Quantization
    ) -> None:
        """Nothing is quantized for it, unless it says more of that."""

    def caveats(self, quantization: Quantization) -> list[str]:
        return []

    def _refuse_adapters(self) -> NoReturn:
        raise ModelError(
            f"{self.title} serves no adapters of ours; merge them (`kind: merge`), and serve what comes out"
        )

    def _refuse_reloads(self) -> NoReturn:
        raise ModelError(f"{self.title} loads its weights once; completions to learn from are sampled by vllm")
