"""What runs on a rank: the engine, what is observed, and the trace of it."""
