"""Scenarios, and the presets that choose among them.

- A scenario is a frozen value. Its id, one line of text, is its only serial form.
- A scenario has one choice from each column of the catalogue: topology, precision,
  optimizer, faults, model, recipe, settings of the scaler. A scenario does not name the
  scaler.
- A recipe has two parts: the mathematics, which the reference follows, and the calls,
  which must not change the result.
- Each choice lists what it needs and what it has (``fixtures/needs.py``). Two choices
  exclude each other if one needs something that the other does not have; the text of
  this need is the reason.
- Presets are covering sets: all pairs or all triples of choices that fit together.
- Facts that a workload does not declare are found once, by a probe on one process
  (``facts``).
"""
