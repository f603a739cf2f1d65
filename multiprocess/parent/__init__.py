"""The process that watches the ranks: it requests them, sends calls, and judges."""
