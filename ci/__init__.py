"""What a project checks in: a workload and its CI job (init), a baseline (the gate)."""
