"""Sessions: cases run on ranks, are judged and recorded.

- A case is a scaler in a scenario. Cases share worlds, runs without a scaler and
  references.
- The process of a session trains nothing. Ranks come from the pool or from torchrun
  (``launcher``), and references are trained by a rank of their own beside them.
- A stack is judged before its scaler: if the run without a scaler fails, no law accuses
  the scaler. No violation rests on one run.
- A failure of the harness is an error of the case and never a verdict (``failures``).
- A report is written case by case (``recorder``), so a run that ends early leaves one.
"""
