"""Code of the forkserver and of the ranks that it forks.

- The forkserver imports torch once and has one thread, so it may fork. The forkserver
  ends with its parent, and every rank ends with the forkserver.
- A rank answers one message at a time (``worker``): join a process group, run a call,
  restore what the call has changed (``global_state``).
- A rank notes where it is and which collectives it issued (``flight_recorder``). The
  notes are in memory that its parent can read, even after a crash.
"""
