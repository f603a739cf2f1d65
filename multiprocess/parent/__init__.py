"""The process that watches the ranks: it starts them, sends calls, evaluates results.

- A rank is forked by a forkserver (``forkserver_client``) and serves many calls. Worlds
  hold CPU slots, which all sessions of a machine share (``slots``).
- One loop waits for messages, exits and output of all ranks (``watch``). After the
  first fault the other ranks have a short time to end or to fail; then the call is
  ended.
- The rank that failed first is derived from these observations (``root_cause``), and
  not from the text of an error or a stack.
"""
