"""Call histories: programs that users write, drawn, run and held against an oracle."""
