"""A comparison's table and HTML page show everything measured, and explain or omit what was not."""

import re

from flows.compare.report import LABEL_CHARACTERS, html_report, throughput_plot
from flows.compare.table import COLUMNS, as_json, as_text, cells


def test_only_what_was_measured_has_a_column(make_row):
    text = as_text([make_row(100.0), make_row(50.0, mfu=0.4)])
    heading, first, second = text.splitlines()
    assert "MFU" in heading
    assert "bubble" not in heading
    assert first.split()[-1] == "–"
    assert second.split()[-1] == "40.0%"


def test_a_table_wider_than_the_terminal_is_shown_in_parts_that_fit(make_row):
    known = dict.fromkeys(COLUMNS.keys() - {"tokens_per_s"}, 0.25)
    rows = [make_row(1000.0 * n, n, text=f"megatron tp={n} sequence_parallel=True", **known) for n in (1, 2)]
    wide, narrow = as_text(rows).splitlines(), as_text(rows, width=80).splitlines()
    assert as_text(rows, width=len(wide[0])).splitlines() == wide
    assert max(map(len, narrow)) <= 80 < len(wide[0])
    for number, line in enumerate(wide[1:], 1):
        cells = [cell for one in narrow if one.startswith(f"{number} ") for cell in one.split()[1:]]
        assert cells == line.split()
    headings = [word for one in narrow if one.startswith("  ") for word in one.split()]
    assert ["layout", *headings] == wide[0].split()


def test_failures_are_told_below_the_table(make_row):
    text = as_text([make_row(100.0), make_row(0.0, text="fsdp dp_shard=9", error="ResourceError: no memory")])
    assert text.splitlines()[-1] == "fsdp dp_shard=9  ResourceError: no memory"


def test_a_table_of_failures_alone_is_still_a_table(make_row):
    assert as_text([make_row(0.0, text="x", error="broken")]).splitlines()[-1] == "x  broken"


def test_every_line_of_the_artifact_has_the_same_keys(make_row):
    lines = cells([make_row(100.0, peak_memory_gib_rank_0=1.0), make_row(0.0, error="broken")])
    assert lines[0].keys() == lines[1].keys()
    assert as_json([make_row(0.0, error="broken")])[0]["error"] == "broken"


def test_the_page_has_a_plot_for_all_that_is_known(make_row):
    known = {"peak_memory_gib": 2.0, "peak_memory_gib_rank_0": 2.0, "predicted_memory_gib": 1.5}
    rows = [make_row(100.0 * n, n, predicted_step_time_s=0.9, **known) for n in (1, 2)]
    page = html_report("Layouts", ["on an abacus"], rows)
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == [
        "Throughput",
        "Memory",
        "Predicted against measured: s a step",
        "Predicted against measured: GiB",
        "Strong scaling",
    ]
    assert page.count("<svg") == len(headings)
    assert "on an abacus" in page


def test_no_whisker_reaches_below_zero(make_row):
    drawn = throughput_plot([make_row(100.0, step_time_iqr_s=5.0), make_row(50.0)])
    ticks = re.findall(r"<!-- (\S+) -->", drawn)
    assert "0" in ticks
    assert not [tick for tick in ticks if tick.startswith(("-", "\N{MINUS SIGN}"))]


def test_the_page_fits_a_phone_and_follows_the_colours_of_its_reader(make_row):
    page = html_report("Layouts", [], [make_row(100.0)])
    assert '<meta name="viewport" content="width=device-width' in page
    assert "color-scheme: light dark" in page and "@media (prefers-color-scheme: dark)" in page
    assert re.search(r"td:first-child {[^}]*white-space: normal", page)


def test_a_long_layout_takes_lines_of_the_plot_and_not_its_width(make_row):
    text = "megatron tp=2 micro_batch_size=4 sequence_parallel=True recompute=selective"
    labels = re.findall(r"<!-- (.*?) -->", throughput_plot([make_row(100.0, text=text)]))
    lines = [one for one in labels if "=" in one]
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= LABEL_CHARACTERS


def test_a_rate_whose_spread_was_not_measured_has_no_whisker(make_row):
    whisker = re.compile(r'<g id="LineCollection_1">\s*<path d="M ')
    assert whisker.search(throughput_plot([make_row(100.0, step_time_iqr_s=0.5)]))
    assert not whisker.search(throughput_plot([make_row(100.0)]))


def test_the_page_needs_nothing_from_elsewhere(make_row):
    page = html_report("Layouts", [], [make_row(100.0)])
    assert not re.search(r"<(script|link|img)\b", page)


def test_text_is_escaped(make_row):
    page = html_report("<title>", ["a & b"], [make_row(0.0, text="<layout>", error="1 < 2")])
    assert "&lt;layout&gt;" in page
    assert "1 &lt; 2" in page
    assert "a &amp; b" in page
