"""Registry of stage kinds, by name; a new kind is a folder beside this file and one line here."""

from stages.core.contract import StageConfig
from stages.core.fields import Product
from stages.kinds.curate.config import CurateConfig
from stages.kinds.download.config import DownloadConfig
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.generate.config import GenerateConfig
from stages.kinds.merge.config import MergeConfig
from stages.kinds.promote.config import PromoteConfig
from stages.kinds.publish.config import PublishConfig
from stages.kinds.quantize.config import QuantizeConfig
from stages.kinds.serve.config import ServeConfig
from stages.kinds.train.config import TrainConfig

KINDS: dict[str, type[StageConfig]] = {
    "download": DownloadConfig,
    "train": TrainConfig,
    "merge": MergeConfig,
    "generate": GenerateConfig,
    "curate": CurateConfig,
    "quantize": QuantizeConfig,
    "serve": ServeConfig,
    "evaluate": EvaluateConfig,
    "promote": PromoteConfig,
    "publish": PublishConfig,
}


def kind_of(name: str) -> type[StageConfig]:
    """Return the config class of a stage kind, or the base class if this version of the code lacks the kind."""
    return KINDS.get(name, StageConfig)


def makes(kind: str, product: Product) -> bool:
    """Return whether stages of a kind may produce a given type of artifact, such as a model or a dataset."""
    return product in kind_of(kind).PRODUCTS
