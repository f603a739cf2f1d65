"""Files of a project: a workload with its CI job, and a baseline for the gate.

- The gate compares a report with a baseline, and with a list of expected violations;
  its exit code is the result. ``decision`` is a pure function of the three.
- A case or a verdict that is missing is no pass. A report that contradicts itself is
  refused.
- ``init`` and ``job`` write the first from templates.
- What CI systems read (annotations, JUnit, Markdown, a badge) is made of the report.
"""
