"""Reports: JSON lines, and the ways to show them.

- The first line, the header, holds the texts of the checks, so that a report can be
  read without their code. The last line is the footer; all lines between are cases.
- No module here imports torch or a module named in a report.
- ``records`` reads and writes reports, ``schema`` describes them, ``compare`` finds
  differences between two reports, and ``table`` converts them to rows.
- ``terminal`` and ``page`` show a report. Texts from a report are escaped.
- A report that exists is never overwritten.
"""
