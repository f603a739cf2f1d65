"""After the run: laws, references, bounds and parity; pure functions of traces."""
