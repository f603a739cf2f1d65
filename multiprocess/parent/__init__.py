"""The process that watches the ranks: it has them forked, sends calls, and judges."""
