"""Two stacks, versions or settings in the same scenarios: where they differ first."""
