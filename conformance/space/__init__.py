"""Scenarios, recipes, constraints, and the presets that choose scenarios."""
