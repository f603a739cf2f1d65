"""The first difference of two stacks, versions or settings in the same scenarios.

- Each side trains in an interpreter of its own and writes a recording (``record``).
- The first difference is the first in the order of training that is further apart than
  rounding explains (``differences``). The bounds are the judge's, measured on correct
  runs of each side.
- Nothing is judged: which side is right, a diff does not say.
"""
