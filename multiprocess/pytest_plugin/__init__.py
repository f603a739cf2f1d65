"""``@pytest.mark.world``: the body of a test runs on every rank.

- Fixtures that use ``world`` are evaluated on each rank, all others once, in the
  parent.
- ``controller`` runs in pytest's process, ``remote`` on the ranks, ``runner`` has the
  warm clusters between them.
- Classes of unittest run the same way (``unittests``), those of torch, too (``adopt``).
"""
