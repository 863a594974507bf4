"""A look at data as one HTML page that needs nothing else: no network, no script, in light and dark."""

from __future__ import annotations

from pathlib import Path

from flows.cli.data_text import document_heading, heading, left_out, span, summary
from flows.ledger.home import home
from stages.core.files import write_atomically
from stages.core.lines import visible
from stages.data.summaries import DataLook

TEMPLATE = Path(__file__).with_name("data_page.html.jinja")


def write_page(look: DataLook, recipe: Path, stage: str, page: Path | None) -> Path:
    """Write it to `page`, or below the home; returns where."""
    target = (page or home() / "data" / f"{recipe.stem}-{stage}.html").absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, data_page(look, f"Data of {stage} in {recipe.name}"))
    return target


def data_page(look: DataLook, title: str) -> str:
    """The page. What rows hold is escaped, and shown as it is written."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {
        "visible": visible,
        "span": span,
        "summary": summary,
        "left_out": left_out,
        "heading": heading,
        "document_heading": document_heading,
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(title=title, look=look)
