"""Worlds on several hosts: each process of torchrun is the agent of one rank.

- An agent watches its rank as the parent of a ``Cluster`` does, and reports over
  torchrun's store. The agent of rank 0 decides what runs; the others follow.
- A message is signed together with its purpose, and accepted once (``store``). So a
  process without the secret can neither forge nor replay a message.
- If an agent's heartbeats stop, the run ends with its name (``membership``).
"""
