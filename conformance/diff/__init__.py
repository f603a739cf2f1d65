"""The first difference of two stacks, versions or settings in the same scenarios."""
