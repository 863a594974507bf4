"""Answer to a question about a model's layers, and its towers of media: a walk through the model of its config."""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stages.core.errors import ModelError
from stages.core.redaction import shortened
from stages.models.facts import CONFIG_FILE, ModelFacts
from stages.models.loading import load_config
from stages.models.model_folder import check_config
from stages.models.shape import ModelShape
from stages.models.tower import Tower
from stages.models.tower_walk import walk_towers
from stages.models.walk import LONGEST_REASON, walk


def answer(text: str) -> dict[str, Any]:
    """Return the shape of a model as `shape`, or as `error` why it has none.

    text: JSON of its config, as `config`, and of the contents of its processor's files by their names, as `files`.
    """
    try:
        asked = json.loads(text)
        fields = asked["config"]
        check_config(ModelFacts(fields), "measuring the layers of a model")
        if (family := fields.get("model_type")) not in CONFIG_MAPPING:
            raise ModelError(
                f"measuring the layers of a model: model_type is {family!r}, which this Transformers does not have; "
                "code that came with a model is not run to plan it"
            )
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
            for name, content in {**asked["files"], CONFIG_FILE: fields}.items():
                (Path(folder) / Path(name).name).write_text(json.dumps(content))
            return {"shape": json.loads(_measured(load_config(Path(folder)), Path(folder)).to_json())}
    except ModelError as error:
        return {"error": str(error)}
    except Exception as error:  # of Transformers, about a config that it cannot read
        reason = shortened(f"{type(error).__name__}: {error}", LONGEST_REASON)
        return {"error": f"measuring the layers of a model from its {CONFIG_FILE}: {reason}"}


def _measured(config: Any, folder: Path) -> ModelShape:
    """Return the shape of the model of a config. folder: with the files of its processor, if it has one."""
    shape, measures = walk(config), walk_towers(config, folder)
    towers: list[Tower] = []
    while True:
        try:
            measure = next(measures, None)
            if measure is None:
                return replace(shape, towers=tuple(towers))
            towers.append(measure())
        except (MemoryError, ModelError):
            raise
        except Exception as error:  # such as a processor that needs a package: text can be planned
            print(f"a kind of media is not planned: {type(error).__name__}: {error}", file=sys.stderr)
