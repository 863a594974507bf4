"""Promoted model with all its upstream artifacts, stored without training or serving, for tests of publishing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.planning.plan import PlannedStage
from flows.running.runner import BuiltStage
from flows.store.store import Store
from stages.core.contract import StageContext, StageResult
from stages.kinds.promote.config import PromoteConfig
from stages.kinds.promote.run import run as promote
from stages.kinds.promote.verdict import CHAMPION_FILE, Champion, ComparedChampion
from stages.kinds.publish.config import PublishConfig
from stages.kinds.publish.run import run as publish
from tests.candidates import write_evaluation
from tests.promotion import commit, planned_stages

RIGHT = [1.0] * 90 + [0.0] * 10
WEIGHTS_BYTES = 50_000
BASE_CARD = "---\nlicense: apache-2.0\n---\n# The base\n"
DATA_CARD = "---\nlicense: other\nlicense_name: rows-licence\nlicense_link: LICENSE\n---\n"
TRAINED = {
    "num_rows": 40.0,
    "num_documents": 120.0,
    "num_tokens": 9000.0,
    "num_different_pictures": 7.0,
    "evaluation_loss": 0.25,
}


def recipe_tree(to: str, *, min_score: float = 0.5, adapter: bool = False, **publish: Any) -> dict[str, Any]:
    """Return a recipe that trains, quantizes (but no `adapter`), evaluates, promotes and publishes a model."""
    candidate = "sft" if adapter else "awq"
    train = {
        "kind": "train",
        "method": "sft",
        "model": "base",
        "data": {"dataset": "rows", "sequence_length": 256},
        "steps": 500,
        "global_batch_size": 8,
        "learning_rate": 3e-3,
    }
    quantize = {"kind": "quantize", "model": "sft", "method": "awq", "calibration": {"dataset": "rows"}}
    gates = {"min_scores": {"sums.exact_match": min_score}}
    return {
        "base": {"kind": "download", "model": "hf://owner/base@main"},
        "rows": {"kind": "download", "dataset": "hf://datasets/owner/rows"},
        "sft": {**train, "adapter": {"rank": 8}} if adapter else train,
        **({} if adapter else {"awq": quantize}),
        "scores": {"kind": "evaluate", "model": candidate, "tasks": ["sums"]},
        "promote": {
            "kind": "promote",
            "name": "adder",
            "model": candidate,
            "evaluations": ["scores"],
            "gates": gates,
        },
        "publish": {"kind": "publish", "promotion": "promote", "to": to, **publish},
    }


class Publishing:
    """Store with the artifacts of all stages up to the promotion, in which tests run the publish stage."""

    def __init__(self, folder: Path, tree: dict[str, Any], mark: str = "first", champion: Sequence[float] = ()) -> None:
        self.folder = folder
        self.tree = tree
        self.store = Store(folder / "store")
        self.stages = planned_stages(self.store, tree)
        self.built: dict[str, BuiltStage] = {}
        writers = {
            "base": _write_base,
            "rows": _write_rows,
            "sft": lambda work: _write_trained(work, mark, adapter="awq" not in tree),
            "awq": lambda work: _write_quantized(work, mark),
            "scores": _write_scores,
            "promote": lambda work: self._judge(work, champion),
        }
        for name, write in writers.items():
            if name in self.stages:
                self.built[name] = commit(self.store, self.stages[name], self.built, write)

    @property
    def planned(self) -> PlannedStage:
        return self.stages["publish"]

    def publish(self, **fields: Any) -> StageResult:
        """Run the publish stage in the test's store; `fields` replace fields of the stage's config."""
        config = PublishConfig.model_validate({**self.tree["publish"], **fields})
        self.work.mkdir(exist_ok=True)
        inputs = {name: self.built[name].artifact for name in self.planned.ancestors}
        return publish(config, StageContext(self.work, "publish", "0" * 12, inputs, {}, self.folder / "cache"))

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def card(self) -> str:
        return (self.work / "files" / "README.md").read_text()

    def publication(self) -> dict[str, Any]:
        return json.loads((self.work / "publication.json").read_text())

    def said(self) -> list[str]:
        lines = (self.work / "events.jsonl").read_text().splitlines()
        return [event["message"] for event in map(json.loads, lines) if event["event"] == "milestone"]

    def _judge(self, work: Path, champion: Sequence[float]) -> None:
        standing = None
        if champion:
            write_evaluation(self.folder / "champion", champion)
            standing = Champion(version="3", same_model=False, evaluations=(self.folder / "champion",))
        (work / CHAMPION_FILE).write_text(ComparedChampion(champion=standing).model_dump_json())
        config = PromoteConfig.model_validate(self.tree["promote"])
        inputs = {name: self.built[name].artifact for name in self.stages["promote"].ancestors}
        context = StageContext(work, "promote", "0" * 12, inputs, {}, self.folder / "cache")
        _write_result(work, promote(config, context))


def _write_base(work: Path) -> None:
    (work / "model").mkdir()
    (work / "model" / "README.md").write_text(BASE_CARD)
    (work / "model" / "LICENSE").write_text("Apache License")
    (work / "model" / "model.safetensors").write_bytes(bytes(100))
    _write_result(work, StageResult(tags={"source": "hf://owner/base@main", "revision": "a" * 40}))


def _write_rows(work: Path) -> None:
    (work / "data").mkdir()
    (work / "data" / "README.md").write_text(DATA_CARD)
    (work / "data" / "train.jsonl").write_text('{"text": "1 + 1 = 2"}\n')
    _write_result(work, StageResult(tags={"source": "hf://datasets/owner/rows", "revision": "b" * 40}))


def _write_trained(work: Path, mark: str, *, adapter: bool) -> None:
    if adapter:
        (work / "adapter").mkdir()
        (work / "adapter" / "adapter_model.safetensors").write_bytes(mark.encode().ljust(WEIGHTS_BYTES))
        config = {"base_model_name_or_path": "base-0123456789ab", "r": 8}
        (work / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    else:
        _write_model(work, f"trained {mark}")
    _write_result(
        work, StageResult(metrics=TRAINED, tags={"layout": "DP1", "device_name": "CPU", "media_sha256": "c" * 64})
    )


def _write_quantized(work: Path, mark: str) -> None:
    _write_model(work, mark)
    _write_result(work, StageResult(metrics={"kl_nats_per_token": 0.0021, "size_after_mib": 0.05}))


def _write_model(work: Path, content: str) -> None:
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    (work / "model" / "model.safetensors").write_bytes(content.encode().ljust(WEIGHTS_BYTES))


def _write_scores(work: Path) -> None:
    write_evaluation(work, RIGHT)
    metrics = {"sums.exact_match": 0.9, "sums.exact_match_stderr": 0.03, "seconds": 2.0}
    _write_result(work, StageResult(metrics=metrics))


def _write_result(work: Path, result: StageResult) -> None:
    (work / "result.json").write_text(result.model_dump_json())
