"""Helper that runs the curate stage on datasets in files, and returns what it wrote."""

import json
from dataclasses import dataclass
from pathlib import Path

from stages.core.contract import StageContext, StageResult
from stages.kinds.curate.config import CurateConfig
from stages.kinds.curate.run import run
from tests.findings import raise_findings


@dataclass(frozen=True)
class Curated:
    folder: Path
    result: StageResult

    @property
    def rows(self):
        return lines(self.folder / "data" / "train.jsonl")

    @property
    def dropped(self):
        return lines(self.folder / "dropped.jsonl")

    @property
    def report(self):
        return json.loads((self.folder / "report.json").read_text())


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def curate(folder, rows, outside=None, **fields):
    """Run the curate stage on rows of one dataset or, by name, several (None: existing files); return results."""
    datasets = rows if isinstance(rows, dict) else {"mine": rows}
    for name, content in datasets.items():
        if content is None:
            continue
        (folder / name / "data").mkdir(parents=True, exist_ok=True)
        text = "".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        (folder / name / "data" / "train.jsonl").write_text(text, encoding="utf-8")
    work = folder / "work"
    work.mkdir(exist_ok=True)
    config = CurateConfig.model_validate({"kind": "curate", "datasets": list(datasets), **fields})
    inputs = {name: folder / name for name in datasets}
    context = StageContext(work, "curated", "0" * 12, inputs, {}, folder / "cache", outside or {})
    result = run(config, context)
    raise_findings(context)
    return Curated(work, result)
