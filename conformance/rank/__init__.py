"""The code that runs on a rank: engine, observers, trace."""
