"""Plots of a report as small inline SVG: curves, a skip strip, errors against bounds.

Drawn by hand and not by a plotting library: a report of 500 scenarios must render in
seconds and stay under 3 MB, its text must take the page's colour in light and dark, and
be read aloud and searched. Shapes carry classes; the page's style sheet colours them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from .report import CaseRecord, Curves, Number
from .terminal import plain

__all__ = [
    "Series",
    "error_bars",
    "line_chart",
    "loss_chart",
    "scale_chart",
    "skip_strip",
]

WIDTH, HEIGHT = 360, 170
LEFT, TOP, BOTTOM = 56, 22, 28
STYLES = 4
"""Line styles that the page's style sheet knows: ``s0`` to ``s3``."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: values by step; nan leaves a gap."""

    label: str
    values: Sequence[float]
    style: str


def loss_chart(records: Sequence[CaseRecord]) -> Markup:
    """Loss of every scaler and of the fp64 reference."""
    known = [(r, r.curves) for r in records if r.curves is not None]
    reference = next((c.reference_loss for _, c in known if c.reference_loss), [])
    series = [Series(label="fp64", values=floats(reference), style="ref")]
    series += [
        Series(label=r.scaler, values=floats(c.loss), style=f"s{i % STYLES}")
        for i, (r, c) in enumerate(known)
    ]
    return line_chart("loss against the fp64 reference", series)


def scale_chart(record: CaseRecord, curves: Curves) -> Markup:
    """Scale after each step on every rank, as powers of two."""
    series = [
        Series(
            label=f"rank {rank}",
            values=[math.log2(v) if v > 0 else math.nan for v in floats(scales)],
            style=f"s{rank % STYLES} w{max(0, 3 - rank)}",
        )
        for rank, scales in enumerate(curves.scale)
    ]
    return line_chart(f"log2 of the scale, {record.scaler}", series)


def line_chart(title: str, series: Sequence[Series]) -> Markup:
    """A chart of lines over steps; empty where there is nothing to draw."""
    drawn = [s for s in series if any(math.isfinite(v) for v in s.values)]
    if not drawn:
        return Markup("")
    finite = [v for s in drawn for v in s.values if math.isfinite(v)]
    low, high = min(finite), max(finite)
    pad = (high - low) * 0.06 or abs(high) * 0.01 or 1.0
    frame = _Frame(low - pad, high + pad, max(len(s.values) for s in drawn))
    body = [frame.axis(low), frame.axis(high), frame.steps()]
    body += [frame.line(s) for s in drawn]
    body += [_legend(i, s) for i, s in enumerate(drawn)]
    return _svg(title, body, WIDTH + 210, HEIGHT)


@dataclass(frozen=True)
class _Frame:
    low: float
    high: float
    count: int

    def x(self, step: int) -> float:
        return LEFT + (WIDTH - LEFT) * step / max(1, self.count - 1)

    def y(self, value: float) -> float:
        span = HEIGHT - TOP - BOTTOM
        return TOP + span * (self.high - value) / (self.high - self.low)

    def axis(self, value: float) -> Markup:
        y = self.y(value)
        return Markup(
            '<path class="grid" d="M{0} {1:.1f}H{2}"/>'
            '<text x="{3}" y="{4:.1f}" text-anchor="end">{5}</text>'
        ).format(LEFT, y, WIDTH, LEFT - 6, y + 4, f"{value:.4g}")

    def steps(self) -> Markup:
        last = self.count - 1
        return Markup(
            '<text x="{0}" y="{1}">step 0</text>'
            '<text x="{2}" y="{1}" text-anchor="end">{3}</text>'
        ).format(LEFT, HEIGHT - 8, WIDTH, last)

    def line(self, series: Series) -> Markup:
        pieces, pen = [], "M"
        for step, value in enumerate(series.values):
            if math.isfinite(value):
                pieces.append(f"{pen}{self.x(step):.1f} {self.y(value):.1f}")
            pen = "L" if math.isfinite(value) else "M"
        return Markup('<path class="line {}" d="{}"/>').format(
            series.style, "".join(pieces)
        )


def _legend(row: int, series: Series) -> Markup:
    y = TOP + 6 + 16 * row
    return Markup(
        '<path class="line {}" d="M{} {}h20"/><text x="{}" y="{}">{}</text>'
    ).format(series.style, WIDTH + 10, y, WIDTH + 35, y + 4, _short(series.label))


def skip_strip(record: CaseRecord, curves: Curves) -> Markup:
    """Ranks x steps: who stepped, who skipped, where a gradient was bad."""
    steps = max((len(row) for row in curves.stepped), default=0)
    if not steps:
        return Markup("")
    size = 16
    body = []
    for rank, row in enumerate(curves.stepped):
        y = TOP + rank * size
        body.append(
            Markup('<text x="{}" y="{}" text-anchor="end">rank {}</text>').format(
                LEFT - 6, y + 12, rank
            )
        )
        for step, stepped in enumerate(row):
            bad = curves.bad[rank][step] if step < len(curves.bad[rank]) else ""
            body.append(_square(LEFT + step * size, y, size - 2, stepped, bad))
    height = TOP + size * len(curves.stepped) + 22
    key = "filled: stepped · hollow: skipped · cross: bad gradient here"
    body.append(Markup('<text x="{}" y="{}">{}</text>').format(LEFT, height - 6, key))
    width = max(WIDTH + 60, LEFT + steps * size)
    return _svg(f"decisions by rank and step, {record.scaler}", body, width, height)


def _square(x: float, y: float, size: float, stepped: bool | None, bad: str) -> Markup:
    kind = {True: "on", False: "off", None: "unknown"}[stepped]
    square = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
        kind, x, y, size, size
    )
    if not bad:
        return square
    cross = Markup('<path class="cross" d="M{0} {1}l{2} {2}m0 -{2}l-{2} {2}"/>')
    return square + cross.format(x + 3, y + 3, size - 6)


def error_bars(record: CaseRecord, curves: Curves, most: int = 8) -> Markup:
    """The parameters nearest to their bounds, or furthest beyond them."""
    ratios = {n: float(v) for n, v in curves.parameters.items()}
    worst = sorted(ratios.items(), key=lambda item: -item[1])[:most]
    if not worst:
        return Markup("")
    left, length = 250, 200
    body = []
    for row, (name, ratio) in enumerate(worst):
        y = TOP + 18 * row
        width = length * min(1.0, ratio / 2) if math.isfinite(ratio) else length
        body.append(
            Markup(
                '<text x="{0}" y="{1}" text-anchor="end">{2}</text>'
                '<rect class="{3}" x="{4}" y="{5}" width="{6:.1f}" height="11"/>'
                '<text x="{7:.1f}" y="{1}">{8:.2g}</text>'
            ).format(
                left - 6,
                y + 10,
                _short(name, 38),
                "over" if ratio > 1 else "on",
                left,
                y,
                max(1.0, width),
                left + width + 5,
                ratio,
            )
        )
    height = TOP + 18 * len(worst) + 4
    body.append(
        Markup('<path class="bound" d="M{} {}V{}"/>').format(
            left + length / 2, TOP - 4, height
        )
    )
    title = f"largest error / bound by parameter (line: 1), {record.scaler}"
    return _svg(title, body, left + length + 60, height)


def floats(values: Sequence[Number | None]) -> list[float]:
    """Numbers of a record; None and infinities become nan, which is not drawn."""
    found = [math.nan if v is None else float(v) for v in values]
    return [v if math.isfinite(v) else math.nan for v in found]


def _short(text: str, most: int = 28) -> str:
    text = plain(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _svg(title: str, body: Sequence[Markup], width: float, height: float) -> Markup:
    safe = escape(plain(title))
    return Markup(
        '<svg role="img" viewBox="0 0 {0} {1}" style="max-width:{0}px">'
        '<title>{2}</title><text class="title" x="0" y="12">{2}</text>{3}</svg>'
    ).format(round(width), round(height), safe, Markup("").join(body))
