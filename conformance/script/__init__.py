"""The standalone script of a failure, which needs only torch.

- ``template`` trains, compares and prints; ``scaled`` is added if a scaler is tested.
  Both are normal modules: linted, typed and tested.
- The workload is the user's class, imported, or the source of a built-in model and its
  layout (``pieces``).
- ``bundle`` joins definitions, with all that they need, to one text.
- A script exits with 1 only if it has shown the fault.
"""
