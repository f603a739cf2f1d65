"""``@pytest.mark.world``: a test runs on every rank, in a pytest session of the rank.

- ``plugin`` has the hooks of every session.
- ``controller`` puts ranks behind a test and merges their reports.
- ``rank_session`` is the session on a rank.
- ``runner`` has the warm clusters between them.
- Classes of unittest run by ``unittests``, and those of torch by ``adopt``.
"""
