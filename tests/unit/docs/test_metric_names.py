"""The documentation page on comparisons lists the name of every metric and parameter."""

from pathlib import Path

from tests.metric_names import markdown_table

PAGE = Path(__file__).parents[3] / "flows/compare/README.md"


def test_the_page_shows_the_table_of_names():
    assert markdown_table() in PAGE.read_text(encoding="utf-8")
