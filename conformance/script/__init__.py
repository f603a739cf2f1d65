"""The standalone script of a failure, which needs torch alone.

- What trains, compares and prints is ``template``, and ``scaled`` where a scaler is
  judged: modules like all others, linted, typed and tested.
- The workload is the user's class, imported, or the model and layout of a built-in one
  as their source has them (``pieces``).
- ``bundle`` makes one text of definitions with all that they need.
- A script exits with 1 only where it has shown the fault.
"""
