"""The support matrix contains what recorded test runs have proved, and nothing else."""

import json

import pytest

from tests import matrix
from tests.pages import ROOT

COMMIT = "0123456789" * 4
REPORT = """<testsuites><testsuite name="{commit}" timestamp="2026-11-25T19:25:00.1">
<testcase file="tests/gpu/test_one.py" classname="a" name="x"/>
<testcase file="tests/gpu/test_one.py" classname="a" name="y"><skipped/></testcase>
<testcase file="tests/gpu/test_two.py" classname="b" name="x"><failure/></testcase>
</testsuite></testsuites>"""
ROWS = (
    matrix.Capability("first", ("tests/gpu/test_one.py",), ("tests/gpu/test_one.py",), "a part"),
    matrix.Capability("second", ("tests/gpu/test_two.py",)),
    matrix.Capability("third", ("tests/gpu/test_tw",)),
)


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "RECORD", tmp_path / "matrix.json")
    monkeypatch.setattr(matrix, "CAPABILITIES", ROWS)

    def run(commit, *options, nightly=()):
        reports = [tmp_path / f"{number}.xml" for number in range(1 + len(nightly))]
        for report, of in zip(reports, (commit, *nightly), strict=True):
            report.write_text(REPORT.format(commit=of))
        monkeypatch.setattr("sys.argv", ["matrix.py", *map(str, reports), *options])
        matrix.main()

    return run


def test_cells_are_counts_of_the_recorded_run(record):
    record(COMMIT)
    assert matrix.table().splitlines()[2:] == [
        "| first | 1 test, 1 skipped | – | a part; GPUs |",
        "| second | 1 failed | – | – |",
        "| third | – | – | – |",
    ]
    assert matrix.source() == "CPU: `0123456` on 2026-11-25. GPU: no GPU has run this yet."


def test_a_run_on_a_card_is_shown_beside_that_on_a_cpu(record):
    record(COMMIT)
    record(COMMIT, "--card", "NVIDIA H100")
    assert matrix.table().splitlines()[2] == (
        "| first | 1 test, 1 skipped | 1 test, 1 skipped, NVIDIA H100, 2026-11-25 | a part |"
    )


def test_what_nightly_parts_proved_of_the_same_commit_is_counted_too(record):
    record(COMMIT, nightly=[COMMIT])
    assert matrix.table().splitlines()[2] == "| first | 2 tests, 2 skipped | – | a part; GPUs |"
    with pytest.raises(SystemExit, match=f"expected {COMMIT}, as the first report"):
        record(COMMIT, nightly=[COMMIT[::-1]])


@pytest.mark.parametrize("commit", [f"{COMMIT}-dirty", "pytest"])
def test_a_run_that_is_not_of_a_commit_is_refused(record, commit):
    with pytest.raises(SystemExit, match="expected a commit of 40 digits"):
        record(commit)


def test_files_that_became_one_are_counted_together(record, tmp_path):
    record(COMMIT)
    text = (tmp_path / "matrix.json").read_text().replace("test_two", "test_one")
    (tmp_path / "matrix.json").write_text(text)
    assert matrix.table().splitlines()[2].startswith("| first | 1 test, 1 skipped, 1 failed |")


@pytest.mark.parametrize("row", matrix.CAPABILITIES, ids=lambda row: row.name)
def test_tests_that_the_matrix_names_exist(row):
    assert [path for path in (*row.cpu, *row.gpu) if not (ROOT / path).exists()] == []


def test_the_record_is_of_one_run_on_a_cpu_at_most():
    runs = json.loads(matrix.RECORD.read_text()) if matrix.RECORD.is_file() else []
    assert len({run["card"] for run in runs}) == len(runs)
