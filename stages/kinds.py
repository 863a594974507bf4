"""The stage kinds there are. A new kind is a folder beside this file and one line here."""

from __future__ import annotations

from stages.core.contract import StageConfig
from stages.curate.config import CurateConfig
from stages.download.config import DownloadConfig
from stages.evaluate.config import EvaluateConfig
from stages.generate.config import GenerateConfig
from stages.merge.config import MergeConfig
from stages.promote.config import PromoteConfig
from stages.publish.config import PublishConfig
from stages.quantize.config import QuantizeConfig
from stages.serve.config import ServeConfig
from stages.train.config import TrainConfig

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
