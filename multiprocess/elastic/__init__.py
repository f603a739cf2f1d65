"""Worlds on several hosts: each process of torchrun is the agent of one rank.

- An agent watches its rank as the parent of a ``Cluster`` does, and reports over
  torchrun's store. The agent of rank 0 decides what runs; the others follow.
- A message is signed with what it is about and taken once (``store``): who can only
  read the store can neither forge nor replay one.
- An agent that is not heard any more ends the run, with its name (``membership``).
"""
