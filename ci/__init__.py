"""The gate: report + baseline + expectations -> exit code, and formats CI knows."""
