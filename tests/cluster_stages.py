"""Recipe for tests of cluster launchers: an SFT stage on a downloaded model and dataset, in a store of its own."""

import json
import sys
from pathlib import Path
from typing import Any

from flows.launch.cluster_job import JobFolder
from flows.planning.outside import resolve_outside
from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.running.runner import BuiltStage, run_stage
from flows.store.store import Store

sys.path.insert(0, str(Path(__file__).parent / "faults"))
from tiny import Notes

from tests.train_stage import make_config

SOURCES = ("base", "problems")


def messages(folder: Path) -> str:
    """Return the messages that a stage and its launcher (Slurm or Kubernetes) wrote into `events.jsonl`."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return "\n".join(json.loads(line)["message"] for line in lines)


class Refresh:
    """Pipeline run for tests of launchers: downloads (`train_stage.make_artifacts`), then SFT with this `execution`."""

    def __init__(self, folder: Path, artifacts: dict[str, Path], execution: dict[str, Any], **fields: Any) -> None:
        self.store = Store(folder / "store")
        layout = {"layout": {"dp_shard": 2, "micro_batch_size": 2}}
        execution = {"measure_matmul_rate": False, "threads": 1, **execution}
        sft = make_config(**layout, execution=execution, **fields).model_dump(mode="json", exclude_defaults=True)
        tree = {
            "base": {"kind": "download", "model": f"file://{artifacts['base'] / 'model'}"},
            "problems": {"kind": "download", "dataset": f"file://{artifacts['problems'] / 'data'}"},
            "sft": {"kind": "train", **sft},
        }
        recipe = load_stages("cluster", folder, tree)
        self.stages = plan(recipe, resolve_outside(recipe, tuple(recipe.stages)), self.store.index()).stages
        self.notes = Notes()

    @property
    def work(self) -> Path:
        """Work folder of the refresh's SFT stage."""
        planned = self.stages["sft"]
        return self.store.work_folder(planned.kind, planned.name, planned.resume_key)

    @property
    def job(self) -> str:
        """Name of the cluster job that runs the refresh's SFT stage."""
        order = JobFolder.of(self.work).order()
        assert order
        return order.job

    def run(self, **options: Any) -> BuiltStage:
        """Run the two download stages and the SFT stage; return the outcome of the SFT stage."""
        built: dict[str, BuiltStage] = {}
        for name in SOURCES:
            built[name] = run_stage(self.stages[name], built, self.store, Notes())
        return run_stage(self.stages["sft"], built, self.store, self.notes, **options)
