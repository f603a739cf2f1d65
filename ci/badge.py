"""Badge: an SVG with the percentage of passing cases; 100 only if all pass."""

from __future__ import annotations

from html import escape

from ..conformance.report.records import Report

__all__ = ["percentage", "render", "render_badge"]

_LABEL = "gradparity"
_CHARACTER = 6.6  # width of a character in pixels, of the font below at its size
_PADDING = 10
_GOOD, _SOME, _BAD, _UNKNOWN = "#2a7d2e", "#8a6100", "#b3261e", "#5a5a5a"


def percentage(passed: int, total: int) -> int:
    """Return a percentage, rounded down: 9999 of 10000 is 99.

    Raises:
        ValueError: if the counts are inconsistent.
    """
    if not 0 <= passed <= total or total == 0:
        raise ValueError(f"{passed} of {total} is not a share")
    return 100 * passed // total


def render(report: Report) -> str:
    """Return the badge of a report; an incomplete or empty one has no percentage."""
    total = sum(c.status != "skipped" for c in report.cases)
    if report.incomplete:
        return render_badge("incomplete", _UNKNOWN)
    if total == 0:
        return render_badge("no cases", _UNKNOWN)
    passed = sum(c.status == "pass" for c in report.cases)
    share = percentage(passed, total)
    colour = _GOOD if passed == total else _SOME if share >= 90 else _BAD
    return render_badge(f"{share} %", colour)


def render_badge(words: str, colour: str) -> str:
    """Return a badge with the texts ``gradparity`` and ``words``."""
    left = round(len(_LABEL) * _CHARACTER) + _PADDING
    right = round(len(words) * _CHARACTER) + _PADDING
    title = escape(f"{_LABEL}: {words}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" '
        f'role="img" aria-label="{title}">\n'
        f"<title>{title}</title>\n"
        f'<rect width="{left}" height="20" fill="#333"/>\n'
        f'<rect x="{left}" width="{right}" height="20" fill="{escape(colour)}"/>\n'
        '<g fill="#fff" text-anchor="middle" '
        'font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">\n'
        f'<text x="{left / 2}" y="14">{_LABEL}</text>\n'
        f'<text x="{left + right / 2}" y="14">{escape(words)}</text>\n'
        "</g>\n</svg>\n"
    )
