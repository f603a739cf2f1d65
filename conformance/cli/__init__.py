"""Arguments and lists of the command line.

- Options and their values are checked before torch is imported. So a wrong option is
  reported within a tenth of a second, in one line and with exit code 2.
- ``Chosen`` holds the scenarios and scalers of a run, for the command line and pytest.
"""
