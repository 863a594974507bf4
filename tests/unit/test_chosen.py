"""Test cases chosen for `make test` cover all pairs of options; `make nightly` runs each nightly test once."""

import json
from itertools import combinations, product
from pathlib import Path

from tests.nightly import parts
from tests.pairwise import pairwise

ROOT = Path(__file__).parents[1]
AXES = {"engine": "ab", "layout": "wxyz", "adapter": (False, True), "data": (1, 2, 3)}

HELD_OFF = {
    "truncation cuts a picture's tokens": (
        "unit/stages/data/media/test_prepared_media.py::test_truncation_never_cuts_a_picture",
    ),
    "a process without pictures hangs the others": (
        "parity/test_pictures.py::test_a_process_without_pictures_neither_hangs_nor_changes_the_loss",
    ),
    "caches of pixels fill the disk": (
        "unit/stages/data/media/test_prepared_media.py::test_the_cache_has_no_pixels_and_little_beside_tokens",
    ),
    "servers scale pictures otherwise": (
        "pipeline/test_serve_pictures.py::test_pictures_of_another_size_or_number_are_not_compared",
    ),
    "training waits for pictures": (
        "unit/stages/kinds/train/test_pictures.py::test_supervised_training_begins_with_the_loss_of_transformers",
    ),
    "GRPO mixes pictures up": ("parity/test_pictures_equal_trl.py::test_completions_of_prompts_with_pictures",),
    "an adapter's names match nothing": (
        "unit/stages/adapters/test_lora.py::test_what_cannot_be_adapted_is_refused_by_name",
        "pipeline/test_serve_pictures.py::test_documents_with_pictures_are_read_as_in_training",
    ),
    "a frozen tower takes the merger along, an adapter the tower": (
        "unit/stages/engines/test_pictures.py::test_every_parameter_is_in_one_part_and_mergers_are_projectors",
        "unit/stages/engines/test_pictures.py::test_an_adapter_goes_on_the_language_model_is_loaded_by_peft_and_merged",
    ),
    "placeholders and media differ in number": (
        "unit/stages/data/media/test_prepared_media.py::test_what_is_wrong_with_media_is_said_by_file_and_row",
    ),
    "long videos are seen in part, at other times": (
        "unit/stages/models/test_processor.py::test_a_long_video_is_seen_to_its_end_and_times_of_its_frames_are_said",
    ),
}
"""Ten troubles that users of other trainers report of models that see, and the tests that hold each off here."""


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


def test_what_hurts_others_is_held_off_by_tests():
    named = [name.split("::") for names in HELD_OFF.values() for name in names]
    assert [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []
