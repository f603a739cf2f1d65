"""Sessions: train cases on ranks, check them and write the report.

- A case is one scaler in one scenario. Cases share worlds, runs without a scaler and
  references.
- The process of a session trains nothing. Ranks come from the pool or from torchrun
  (``launcher``). References train beside them, on a separate rank.
- The run without a scaler is checked first. If it fails, the workload is reported and
  not the scaler. A hang, or a difference from the run without a scaler, is reported
  only after a second run.
- A failure of the harness is an error of the case and never a verdict (``failures``).
- A report is written case by case (``recorder``), so a run that ends early leaves one.
"""
