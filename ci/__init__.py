"""Files of a project: a workload with its CI job, and a baseline for the gate.

- The gate compares a report with a baseline, and with a list of expected violations;
  its exit code is the result. ``decision`` computes it from these three alone.
- A missing case or verdict is not a pass. A report that contradicts itself is rejected.
- ``init`` and ``job`` write workload and CI job from templates.
- Files for CI systems (annotations, JUnit, Markdown, a badge) are made from the report.
"""
