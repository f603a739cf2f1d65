"""A report is data: JSON lines, and the ways to show them.

- The first line, the header, holds the texts of the laws, so that a report can be read
  without the judge. Every other line is a case.
- No module here imports torch or a module named in a report.
- ``records`` reads and writes them, ``schema`` describes them, ``compare`` finds what
  differs between two reports, ``table`` makes rows of them.
- ``terminal`` and ``page`` show the rows. Texts from a report are escaped.
- A report that exists is never overwritten.
"""
