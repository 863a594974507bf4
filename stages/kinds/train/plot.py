"""The loss curve as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SERIES = {"loss": "training", "evaluation_loss": "held out"}


def plot_loss(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the losses in `rows` (lines of `metrics.jsonl`) over the steps, as PNG."""
    from matplotlib import artist

    # What each class documents of what it can be set to takes longer than the picture.
    vars(artist)["kwdoc"] = lambda _: ""
    setattr(artist.Artist, "_update_set_signature_and_docstring", lambda: None)  # noqa: B010 (private: not in its stubs)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, label in SERIES.items():
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 20 else None)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
