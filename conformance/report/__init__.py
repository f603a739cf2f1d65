"""Records of a report, and how they are shown; no torch is imported."""
