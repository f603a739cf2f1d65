"""Check a run by its traces: checks, references, bounds and parity.

All functions are pure.

- A check (class ``Law``) reads ``Evidence`` and returns a ``Finding``. Each file of
  ``laws`` is one chapter of checks.
- A reference is trained on one process in fp64. The reference skips the steps that a
  correct run must skip, because a gradient is not finite, whatever the checked run did.
  Noisy runs are correct runs that differ from the reference by rounding only. The noise
  is the distance of noisy runs from the reference. A bound is a multiple of the noise.
- A workload with its own ``train_step`` may be compared with that step on one rank
  (``one_rank``).
- A doubt says from which step on, and for which parameters, a correct run may differ
  from the reference. A difference under a doubt is inconclusive, in every check.
- Values that could not be compared are counted. A check that compared too few values is
  inconclusive.
- Diagnosis (``localise``, ``boundaries``, ``diagnosis``) runs after the checks and does
  not change their results.
"""
