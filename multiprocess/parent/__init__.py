"""The process that watches the ranks: it requests them, sends calls, and judges.

- A rank is forked by a forkserver (``forkserver_client``) and serves many calls. Worlds
  hold CPU slots, which all sessions of a machine share (``slots``).
- One loop waits for messages, exits and output of all ranks (``watch``). It ends a call
  after the first fault, when the others have had a short time to end or to fail.
- The first rank that failed follows from these observations (``root_cause``). No text
  of an error or a stack is read.
"""
