"""Test cases chosen for `make test` cover all pairs of options; `make nightly` runs each nightly test once."""

import json
from itertools import combinations, product
from pathlib import Path

from tests.nightly import parts
from tests.pairwise import pairwise

ROOT = Path(__file__).parents[1]
AXES = {"engine": "ab", "layout": "wxyz", "adapter": (False, True), "data": (1, 2, 3)}


def pairs(cases):
    return {pair for case in cases for pair in combinations(sorted(case.items(), key=str), 2)}


def test_whatever_meets_in_a_case_meets_in_a_chosen_one():
    cases = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    legal = [case for case in cases if (case["engine"], case["layout"]) != ("b", "z")]
    chosen = pairwise(legal, dict)
    assert pairs(chosen) == pairs(legal)
    assert len(chosen) <= 16 < len(legal)
    assert chosen == [case for case in legal if case in chosen] == pairwise(legal, dict)


def test_each_nightly_test_is_in_one_part():
    marked = [path for path in ROOT.rglob("test_*.py") if "mark.nightly" in path.read_text() and path != Path(__file__)]
    assert len(marked) > 5
    assert set((ROOT / "nightly").glob("test_*.py")) <= set(marked)
    for path in marked:
        name = str(path.relative_to(ROOT))
        in_parts = [
            part.name
            for part in parts.PARTS
            if name not in part.but and any(name == one or name.startswith(f"{one}/") for one in part.tests)
        ]
        assert len(in_parts) == 1, (name, in_parts)


def test_parts_are_due_when_they_have_not_passed_of_late(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "STAMPS", tmp_path / "stamps.json")
    stamp = {"commit": "0123456", "minutes": 1.0, "passed": 3, "skipped": 1}
    days = {"year": "2026-01-01", "homes": f"{parts.datetime.now(parts.UTC):%Y-%m-%d}"}
    parts.STAMPS.write_text(json.dumps({name: {**stamp, "day": day} for name, day in days.items()}))
    due = parts.stale_parts()
    assert "year (last passed on 2026-01-01)" in due
    assert "matrices (never passed)" in due
    assert "homes" not in due
    assert "| `0123456` | 2026-01-01 | 1.0 | 3, 1 |" in parts.table()
