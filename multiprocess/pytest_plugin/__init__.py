"""``@pytest.mark.world``: a test runs on every rank, in a pytest session of the rank.

- ``plugin`` has the hooks of every session.
- ``controller`` runs a test on ranks and merges their reports.
- ``rank_session`` is the session on a rank.
- ``runner`` keeps the warm clusters.
- ``unittests`` runs classes of unittest, and ``adopt`` those of torch.
"""
