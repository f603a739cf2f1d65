"""The pytest plugin of the harness (under construction)."""
