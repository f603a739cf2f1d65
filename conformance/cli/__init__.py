"""Arguments and lists of the command line.

- Options and their values are checked before torch is imported. So an error takes a
  tenth of a second; it is one line, with exit code 2.
- ``Chosen`` holds the scenarios and scalers of a run, for the command line and pytest.
"""
