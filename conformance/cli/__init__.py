"""Arguments and lists of the command line.

- Options and their values are checked before torch is imported: a wrong one costs a
  tenth of a second and is one line, with exit code 2.
- What a run chooses is one value, ``Chosen``, for the command line and for pytest.
"""
