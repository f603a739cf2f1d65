"""Scenarios that can be judged, and the presets that choose them.

- A scenario is a frozen value. Its id, one line of text, is its only serial form.
- It is a choice from each column of the catalogue: topology, precision, optimizer,
  faults, model, recipe, settings of the scaler. It does not name the scaler.
- A recipe has two parts: the mathematics, which the reference follows, and the calls,
  which must not change the result.
- Each choice says what it needs and what it has (``fixtures/needs.py``): what two of
  them exclude is ``needs - has``, and the reason is its text.
- Presets are covering sets: all pairs or all triples of choices that go together.
- What a workload does not declare is found once, by a probe on one process (``facts``).
"""
