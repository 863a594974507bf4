"""Output of `lifecycle data`: a stage's prepared data as HTML and as text, with learned tokens coloured or marked."""

import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flows.ledger.home import home
from stages.core.files import write_atomically
from stages.core.lines import counted, raw_stream, visible
from stages.data.summaries import Bar, DataLook, ShownDocument, ShownPicture, ShownPortion, ShownRow

BEGIN, END = "⟦", "⟧"
BAR_CHARACTERS = 40
MAX_CHARACTERS = 3000
"""Largest number of characters of a document shown on the terminal; the HTML page has more."""
STYLES = {(True, False): "green", (True, True): "green dim", (False, True): "dim", (False, False): ""}
"""Terminal style of a token by two booleans: whether the loss counts it, and whether it is a special token."""
TEMPLATE = Path(__file__).with_name("data_page.html.jinja")


def print_look(look: DataLook) -> None:
    """Print a stage's prepared data to stdout, in colours on a terminal."""
    console = Console(file=raw_stream(sys.stdout), highlight=False, soft_wrap=True)
    is_coloured = console.is_terminal and console.color_system is not None and not console.no_color
    for portion in look.portions:
        console.print("\n".join(portion_lines(portion)), markup=False)
    for warning in look.warnings:
        console.print(f"warning: {visible(warning)}", markup=False)
    for row in look.rows:
        console.print()
        for line in _row(row, coloured=is_coloured):
            console.print(line)


def portion_lines(portion: ShownPortion) -> list[str]:
    """Return text about a stage's training or held-out data: counts, rows left out and why, document lengths."""
    lines = [f"{portion.name}: {summary(portion)}"]
    if portion.unread_after:
        lines.append(f"  there was no time for the rows after {visible(portion.unread_after)}")
    lines += [f"  {line}" for line in left_out(portion)]
    lines += [f"  warning: {visible(warning)}" for warning in portion.warnings]
    lines.append("  tokens of a document")
    width = max(len(span(bar)) for bar in portion.lengths)
    most = max(bar.count for bar in portion.lengths)
    for bar in portion.lengths:
        # Rounded up, so that a single document shows.
        characters = "█" * -(-BAR_CHARACTERS * bar.count // most)
        lines.append(f"    {span(bar):>{width}}  {characters} {bar.count:,}".rstrip())
    return lines


def span(bar: Bar) -> str:
    """Return a histogram bar's range of document lengths, in tokens, such as `12-15`."""
    return f"{bar.first:,}" if bar.first == bar.last else f"{bar.first:,}-{bar.last:,}"


def summary(portion: ShownPortion) -> str:
    """Return one line with the numbers of rows, documents and tokens, and the share of tokens that the loss counts."""
    if portion.sequence_length is None:
        return f"{counted(portion.num_source_rows, 'row')}, {portion.num_tokens:,} tokens"
    visited = "" if portion.share is None else f"; {portion.share:.1%} of what is learned, {portion.epochs:.3g} epochs"
    rows = (
        f"{counted(portion.num_rows, 'row')} of {portion.sequence_length:,} tokens at most, not packed"
        if portion.padding_fraction is None
        else f"{counted(portion.num_rows, 'packed row')} of {portion.sequence_length:,} tokens "
        f"({portion.padding_fraction:.1%} padding)"
    )
    return (
        f"{counted(portion.num_source_rows, 'row')} read → {counted(portion.num_documents, 'document')} in {rows}; "
        f"{portion.num_tokens:,} tokens, {portion.num_target_tokens:,} of them ({portion.target_fraction:.1%}) learned"
        f"{visited}"
    )


def left_out(portion: ShownPortion) -> Iterator[str]:
    """Yield a line for each reason why dataset rows were left out or cut off, with the number of rows."""
    if portion.num_over_long:
        what = "were cut off at" if portion.over_long == "truncate" else "were left out, longer than"
        yield f"{portion.num_over_long:,} rows {what} {portion.sequence_length:,} tokens"
    if portion.num_bad_rows:
        yield f"{portion.num_bad_rows:,} rows were left out that cannot be learned from"
    for dropped in portion.dropped:
        yield f"  {dropped.count:,} × {visible(dropped.reason)} (first: {visible(dropped.example)})"


def _row(row: ShownRow, *, coloured: bool) -> Iterator[Text]:
    yield Text(f"── {heading(row)}", style="bold")
    for document in row.documents:
        yield Text(f"· {document_heading(document)}", style="cyan")
        yield from (Text(f"  {visible(caption(picture))}", style="cyan") for picture in document.pictures)
        yield _text(document, coloured=coloured)


def heading(row: ShownRow) -> str:
    """Return the heading of a shown training row: its name, and its numbers of documents and padding tokens."""
    padding = f", {row.num_padding_tokens:,} tokens of padding" if row.num_padding_tokens is not None else ""
    return f"{visible(row.name)}: {counted(len(row.documents), 'document')}{padding}"


def document_heading(document: ShownDocument) -> str:
    """Return the heading of a shown document: its name, its tokens, and how many of them the loss counts."""
    counts = f"{document.num_tokens:,} tokens, {document.num_target_tokens:,} learned" if document.num_tokens else ""
    return ": ".join(filter(None, [document.name, counts]))


def caption(picture: ShownPicture) -> str:
    """Return the place of a document's medium in one line, with its size and the tokens that stand for it."""
    sizes = [
        f"{picture.width:,} × {picture.height:,} pixels" if picture.width else "",
        "" if picture.seconds is None else f"{picture.seconds:,.1f} seconds",
        "" if picture.num_frames is None else counted(picture.num_frames, "frame"),
        counted(picture.num_tokens, "token"),
    ]
    return f"{picture.path}: {', '.join(filter(None, sizes))}"


def _text(document: ShownDocument, *, coloured: bool) -> Text:
    text, was_learned = Text(), False
    for piece in document.pieces:
        if not coloured and piece.learned != was_learned:
            text.append(BEGIN if piece.learned else END)
            was_learned = piece.learned
        text.append(visible(piece.text), STYLES[piece.learned, piece.special] if coloured else "")
        if len(text) > MAX_CHARACTERS:
            text.truncate(MAX_CHARACTERS)
            break
    is_cut = len(text) >= MAX_CHARACTERS
    if was_learned and not is_cut:
        text.append(END)
    if is_cut or document.num_hidden_tokens:
        text.append(" … (the rest is not shown here)", "italic")
    return text


def write_page(look: DataLook, recipe: Path, stage: str, page: Path | None) -> Path:
    """Write the HTML page about a stage's data to `page`, by default below the lifecycle home; return its path."""
    target = (page or home() / "data" / f"{recipe.stem}-{stage}.html").absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, data_page(look, f"Data of {stage} in {recipe.name}"))
    return target


def data_page(look: DataLook, title: str) -> str:
    """Return the HTML page about a stage's prepared data, with texts of the dataset escaped."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {
        "visible": visible,
        "span": span,
        "summary": summary,
        "left_out": left_out,
        "heading": heading,
        "document_heading": document_heading,
        "caption": caption,
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(title=title, look=look)
