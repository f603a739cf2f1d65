"""A report is data: JSON lines, and the ways to show them.

- The first line, the header, holds the texts of the laws, so that a report can be read
  without the judge. Every other line is a case.
- Nothing here imports torch or a module that a report names.
- ``records`` reads and writes them, ``schema`` describes them, ``compare`` finds what
  differs between two reports, ``table`` makes rows of them.
- ``terminal`` and ``page`` show the rows. What comes from a report is escaped.
- A report that exists is never overwritten.
"""
