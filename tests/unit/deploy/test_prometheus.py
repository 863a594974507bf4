"""Alert rules name metrics that there are, and Debian's `promtool` sees each of them fire."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from flows.ledger.totals import Totals
from flows.tracking.exposition import _home_families, _recipe_families, _stage_families
from stages.serving.tally import Tallies

FOLDER = Path(__file__).parents[3] / "deploy" / "prometheus"
RULES = [FOLDER / name for name in ("alerts.yml", "serving-alerts.yml")]
ALERTS = {
    rule["alert"]: rule
    for path in RULES
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's package prometheus is missing")


def exposed():
    """Return the names of all metrics that a worker and a proxy expose."""
    families = [*_home_families(Totals()), *_recipe_families(Totals(), 0.0), *_stage_families(Totals())]
    names = {f"lifecycle_{family.name}{'_total' if family.is_total else ''}" for family in families}
    for metric in Tallies().collect():
        names |= {f"{metric.name}{end}" for end in ("_total", "_bucket", "_sum", "_count")}
    return names


def test_every_metric_in_a_rule_is_exposed():
    for name, rule in ALERTS.items():
        assert set(re.findall(r"lifecycle_\w+", re.sub(r"by \([^)]*\)", "", rule["expr"]))) <= exposed(), name
        assert {"summary", "action"} <= rule["annotations"].keys(), name


def test_every_metric_on_the_board_is_exposed():
    board = json.loads((FOLDER / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for expression in expressions:
        assert set(re.findall(r"lifecycle_\w+", re.sub(r"by \([^)]*\)", "", expression))) <= exposed(), expression
    assert len(expressions) > 10


def test_every_alert_has_a_test_in_which_it_fires():
    tests = yaml.safe_load((FOLDER / "alerts.test.yml").read_text())["tests"]
    fired = {
        re.search(r'alertname="(\w+)"', sample["labels"])[1]
        for test in tests
        for case in test["promql_expr_test"]
        for sample in case["exp_samples"]
    }
    assert fired == ALERTS.keys()


@needs_promtool
def test_promtool_sees_each_alert_fire_and_none_on_a_quiet_day():
    for command in (
        ["promtool", "test", "rules", "alerts.test.yml"],
        ["promtool", "check", "config", "--syntax-only", "prometheus.yml"],
    ):
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
