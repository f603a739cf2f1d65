"""``@pytest.mark.world``: the body of a test runs on every rank."""
