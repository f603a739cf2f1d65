"""Plots of a report as small inline SVG: curves, a skip strip, errors against bounds.

No plotting library is used: a report of 500 scenarios must render in seconds and stay
under 3 MB. The text of plots must be searchable and readable by screen readers. Its
colour is that of the page, in light and dark mode. Shapes have classes, which the
page's style sheet colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from markupsafe import Markup, escape

from ..status import Number
from .records import CaseRecord, Curves
from .terminal import plain

__all__ = [
    "Series",
    "distance_chart",
    "error_bars",
    "line_chart",
    "scale_chart",
    "skip_strip",
]

NAN = math.nan
WIDTH, HEIGHT = 360, 150
"""Size in pixels; as wide as a phone, so that letters keep their size on every
screen."""
LEFT, TOP, BOTTOM = 52, 22, 22
ROW = 15
CHARACTER = 6.2  # upper bound of the mean width of a letter in pixels
STYLES = 4
"""Line styles that the page's style sheet knows: ``s0`` to ``s3``."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart: values by step; nan leaves a gap."""

    label: str
    values: Sequence[float]
    style: str


def distance_chart(records: Sequence[CaseRecord]) -> Markup:
    """Return a chart of each scaler's distance from the reference loss.

    Distances are shown as powers of ten.
    """
    drawn = [r for r in records if r.curves is not None]
    losses = (r.curves.reference_loss for r in drawn if r.curves is not None)
    truth = floats(next((each for each in losses if each), []))
    lines = []
    for number, record in enumerate(drawn):
        assert record.curves is not None
        pairs = zip_longest(floats(record.curves.loss), truth, fillvalue=NAN)
        distances = [_log(abs(loss - true), 10) for loss, true in pairs]
        style = f"s{number % STYLES}"
        lines.append(Series(label=record.scaler, values=distances, style=style))
    return line_chart("log10 of |loss - fp64|", lines)


def scale_chart(record: CaseRecord, curves: Curves) -> Markup:
    """Return a chart of the scale after each step on every rank, as powers of two.

    Empty if the scale is always 1, as without a scaler.
    """
    if all(value == 1 for scales in curves.scale for value in scales):
        return Markup("")
    series = [
        Series(
            label=f"rank {rank}",
            values=[_log(value, 2) for value in floats(scales)],
            style=f"s{rank % STYLES} w{max(0, 3 - rank)}",
        )
        for rank, scales in enumerate(curves.scale)
    ]
    return line_chart(f"log2 of the scale, {record.scaler}", series)


def _tick(value: float) -> str:
    """Format a label with at most seven characters, the width left of a plot."""
    for digits in (4, 3, 2, 1):
        text = f"{value:.{digits}g}".replace("e+", "e").replace("e0", "e")
        text = text.replace("e-0", "e-")
        if len(text) <= 7:
            break
    return text


def _log(value: float, base: int) -> float:
    """Return the logarithm; nan, which is not drawn, if it does not exist."""
    return math.log(value, base) if value > 0 else NAN


def line_chart(title: str, series: Sequence[Series]) -> Markup:
    """Return a chart of lines over steps; empty if no value is finite."""
    drawn = [s for s in series if any(math.isfinite(v) for v in s.values)]
    if not drawn:
        return Markup("")
    finite = [v for s in drawn for v in s.values if math.isfinite(v)]
    low, high = min(finite), max(finite)
    # A constant curve has no range: give it some height.
    pad = (high - low) * 0.06 or abs(high) * 0.01 or 1.0
    frame = _Frame(low - pad, high + pad, max(len(s.values) for s in drawn))
    # Label the extremes only, once if they are equal.
    body = [frame.axis(v) for v in dict.fromkeys((low, high))]
    body += [frame.steps(), *(frame.line(s) for s in drawn)]
    legend, height = _legend(drawn)
    return _svg(title, [*body, *legend], HEIGHT + height)


@dataclass(frozen=True)
class _Frame:
    """Maps steps and values to pixels."""

    low: float
    high: float
    count: int

    def x(self, step: int) -> float:
        return LEFT + (WIDTH - LEFT - 6) * step / max(1, self.count - 1)

    def y(self, value: float) -> float:
        span = HEIGHT - TOP - BOTTOM
        return TOP + span * (self.high - value) / (self.high - self.low)

    def axis(self, value: float) -> Markup:
        y = self.y(value)
        return Markup(
            '<path class="grid" d="M{0} {1:.1f}H{2}"/>'
            '<text x="{3}" y="{4:.1f}" text-anchor="end">{5}</text>'
        ).format(LEFT, y, WIDTH, LEFT - 6, y + 4, _tick(value))

    def steps(self) -> Markup:
        first = Markup('<text x="{}" y="{}">step 0</text>').format(LEFT, HEIGHT - 8)
        if self.count == 1:
            return first
        last = Markup('<text x="{}" y="{}" text-anchor="end">{}</text>')
        return first + last.format(WIDTH, HEIGHT - 8, self.count - 1)

    def line(self, series: Series) -> Markup:
        """Return the path of a series: nan leaves a gap, a lone step is a dot."""
        pieces, pen = [], "M"
        for step, value in enumerate(series.values):
            if not math.isfinite(value):
                pen = "M"
                continue
            dot = "h0" if pen == "M" else ""
            pieces.append(f"{pen}{self.x(step):.1f} {self.y(value):.1f}{dot}")
            pen = "L"
        return Markup('<path class="line {}" d="{}"/>').format(
            series.style, "".join(pieces)
        )


def _legend(series: Sequence[Series]) -> tuple[list[Markup], int]:
    """Return the legend, in as many columns as fit, and its height."""
    labels = [_short(s.label, 48) for s in series]
    width = 40 + CHARACTER * max(map(len, labels))
    columns = max(1, int(WIDTH // width))
    body = [
        Markup(
            '<path class="line {}" d="M{:.0f} {}h20"/><text x="{:.0f}" y="{}">{}</text>'
        ).format(s.style, x, y, x + 26, y + 4, label)
        for number, (s, label) in enumerate(zip(series, labels, strict=True))
        for x in [4 + width * (number % columns)]
        for y in [HEIGHT + 6 + ROW * (number // columns)]
    ]
    return body, ROW * math.ceil(len(series) / columns)


def skip_strip(record: CaseRecord, curves: Curves) -> Markup:
    """Return a strip of ranks x steps: stepped, skipped, or with a bad gradient."""
    steps = max((len(row) for row in curves.stepped), default=0)
    if all(stepped is None for row in curves.stepped for stepped in row):
        return Markup("")
    # Long runs have narrower squares: the strip never gets wider than a phone.
    size = min(16.0, (WIDTH - LEFT) / steps)
    # Draw one path for each kind of square: one element for each square would make a
    # huge page.
    paths: dict[str, list[str]] = {"on": [], "off": [], "unknown": [], "cross": []}
    body = []
    for rank, row in enumerate(curves.stepped):
        y = TOP + ROW * rank
        body.append(
            Markup('<text x="{}" y="{}" text-anchor="end">rank {}</text>').format(
                LEFT - 6, y + 11, rank
            )
        )
        for step, stepped in enumerate(row):
            x = LEFT + step * size
            paths[_KINDS[stepped]].append(_square(x, y, size - 2))
            if step < len(curves.bad[rank]) and curves.bad[rank][step]:
                paths["cross"].append(_cross(x, y, size - 2))
    body += [
        Markup('<path class="{}" d="{}"/>').format(kind, "".join(shapes))
        for kind, shapes in paths.items()
        if shapes
    ]
    bottom = TOP + ROW * len(curves.stepped) + 12
    key = "filled: stepped · hollow: skipped · cross: bad gradient here"
    body.append(Markup('<text x="{}" y="{}">{}</text>').format(4, bottom, key))
    return _svg(f"decisions by rank and step, {record.scaler}", body, bottom + 8)


_KINDS = {True: "on", False: "off", None: "unknown"}


def _square(x: float, y: float, size: float) -> str:
    return f"M{x:.1f} {y}h{size:.1f}v13h-{size:.1f}z"


def _cross(x: float, y: float, size: float) -> str:
    return f"M{x + 2:.1f} {y + 2}l{size - 4:.1f} 9m0-9l-{size - 4:.1f} 9"


def error_bars(record: CaseRecord, curves: Curves, most: int = 8) -> Markup:
    """Return bars of the parameters with the largest error / bound."""
    ratios = {n: float(v) for n, v in curves.parameters.items()}
    worst = sorted(ratios.items(), key=_badness, reverse=True)[:most]
    if not worst:
        return Markup("")
    left, length = 190, 116
    # Use a scale of decades: factors of 40 and of a million are both beyond the bound.
    largest = max((r for _, r in worst if math.isfinite(r)), default=1.0)
    decades = LEAST_DECADE, max(1, math.ceil(math.log10(max(largest, 1.0))))
    bound = left + length * _share(1.0, *decades)
    body = []
    for row, (name, ratio) in enumerate(worst):
        y = TOP + 18 * row
        width = length * _share(ratio, *decades)
        number = left + width + 5
        if number < bound < number + 32:  # the line would run through the number
            number = bound + 5
        body.append(
            Markup(
                '<text x="{0}" y="{1}" text-anchor="end">{2}</text>'
                '<rect class="{3}" x="{4}" y="{5}" width="{6:.1f}" height="11"/>'
                '<text x="{7:.1f}" y="{1}">{8:.2g}</text>'
            ).format(
                left - 6,
                y + 10,
                _tail(name, 28),
                "on" if ratio <= 1 else "over",
                left,
                y,
                max(1.0, width),
                number,
                ratio,
            )
        )
    height = TOP + 18 * len(worst) + 4
    body.append(
        Markup('<path class="bound" d="M{} {}V{}"/>').format(bound, TOP - 4, height)
    )
    title = f"error / bound (line: 1, in decades), {record.scaler}"
    return _svg(title, body, height)


LEAST_DECADE = -3
"""Decade at which a bar has length 0."""


def _share(ratio: float, least: int, most: int) -> float:
    """Return a bar's length: 0 at decade ``least``, 1 at decade ``most``.

    Nan and inf have length 1.
    """
    if not math.isfinite(ratio):
        return 1.0
    decade = math.log10(ratio) if ratio > 0 else least
    return min(max((decade - least) / (most - least), 0.0), 1.0)


def _badness(item: tuple[str, float]) -> float:
    """Return a sort key; nan may hide any error, so it is worse than every number."""
    return math.inf if math.isnan(item[1]) else item[1]


def floats(values: Sequence[Number | None]) -> list[float]:
    """Convert numbers of a record; None and inf become nan, which is not drawn."""
    numbers = [NAN if v is None else float(v) for v in values]
    return [v if math.isfinite(v) else NAN for v in numbers]


def _short(text: str, most: int) -> str:
    text = plain(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _tail(text: str, most: int) -> str:
    """Return the end of a name, where names of parameters differ most."""
    text = plain(text)
    return text if len(text) <= most else "…" + text[1 - most :]


def _svg(title: str, body: Sequence[Markup], height: float) -> Markup:
    """Return an SVG; its title is complete for screen readers, and shown shortened."""
    return Markup(
        '<svg role="img" viewBox="0 0 {0} {1}"><title>{2}</title>'
        '<text class="title" x="0" y="12">{3}</text>{4}</svg>'
    ).format(
        WIDTH,
        round(height),
        escape(plain(title)),
        escape(_short(title, 54)),
        Markup("").join(body),
    )
