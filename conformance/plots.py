"""Plots of a scenario: loss against the reference, and the scale on every rank.

Drawn as SVG whose text stays text and takes the colour of the page, so that it can be
read aloud, searched, printed and shown on a dark background.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import CaseRecord, Curves, Number
from .terminal import plain

__all__ = ["draw_scenario"]

# Okabe-Ito: told apart in every common form of colour blindness
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
DASHES = ("-", "--", "-.", ":")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": "gray",
    "axes.labelcolor": "gray",
    "axes.edgecolor": "gray",
    "xtick.color": "gray",
    "ytick.color": "gray",
    "legend.frameon": False,
    "text.parse_math": False,  # a name with a dollar sign is a name
}


def draw_scenario(records: Sequence[CaseRecord]) -> str:
    """One row of plots for all scalers in one scenario.

    Returns:
        An ``<svg>`` element, or the empty string where nothing was recorded.
    """
    drawn = [(r, r.curves) for r in records if r.curves is not None and r.curves.loss]
    if not drawn:
        return ""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": records[0].scenario}):
        figure = Figure(figsize=(4.2 * (1 + len(drawn)), 2.2), layout="constrained")
        axes = figure.subplots(1, 1 + len(drawn), squeeze=False)[0]
        _draw_loss(axes[0], drawn)
        for axis, (record, curves) in zip(axes[1:], drawn, strict=True):
            _draw_scale(axis, record, curves)
        return _svg(figure, f"loss and scale in {records[0].scenario}")


def _draw_loss(axis: Axes, drawn: Sequence[tuple[CaseRecord, Curves]]) -> None:
    reference = next((c.reference_loss for _, c in drawn if c.reference_loss), [])
    steps = range(len(reference))
    values = _floats(reference)
    axis.plot(steps, values, color="gray", linewidth=3, alpha=0.5, label="fp64")
    for i, (record, curves) in enumerate(drawn):
        losses = _floats(curves.loss)
        axis.plot(
            range(len(losses)),
            losses,
            color=COLOURS[i % 4],
            linestyle=DASHES[i % 4],
            label=plain(record.scaler),
        )
    axis.set_title("loss and fp64 reference", fontsize=9)
    axis.set_xlabel("step")
    _legend(axis)


def _draw_scale(axis: Axes, record: CaseRecord, curves: Curves) -> None:
    for rank, scales in enumerate(curves.scale):
        axis.step(
            range(len(scales)),
            _floats(scales),
            where="mid",
            color=COLOURS[rank % 4],
            linestyle=DASHES[rank % 4],
            # equal ranks lie upon each other: thinner ones on top leave all visible
            linewidth=max(1.0, 4.5 - rank),
            label=f"rank {rank}",
        )
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda value, _: f"2^{math.log2(value):g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_title(f"scale, {plain(record.scaler)}", fontsize=9)
    axis.set_xlabel("step")
    _legend(axis)


def _legend(axis: Axes) -> None:
    """Beside the plot: the curves may go anywhere in it."""
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _floats(values: Sequence[Number | None]) -> list[float]:
    return [math.nan if v is None or math.isinf(float(v)) else float(v) for v in values]


def _svg(figure: Figure, label: str) -> str:
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # text stays text: it is the reader's font that must have the glyph, not ours
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # the size comes from the page; the label is for those who do not see the plot
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
    safe = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{safe}" ', 1)
