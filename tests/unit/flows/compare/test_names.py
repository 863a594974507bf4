"""The README documents every name of a figure or parameter."""

from pathlib import Path

from flows.compare.names import markdown_table

README = Path(__file__).parents[4] / "README.md"


def test_the_readme_shows_the_table_of_names():
    assert markdown_table() in README.read_text(encoding="utf-8")
