"""Hooks and options of a session work although its tests run on ranks."""

import pytest

from gradparity.tests.multiprocess.test_pytest_plugin import Session, session

pytest_plugins = ["pytester"]
__all__ = ["session"]

# From pytest's documentation: "Post-process test reports / failures".
MAKEREPORT = """
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    rep = yield
    if rep.when == "call" and rep.failed:
        with open("failures", "a", encoding="utf-8") as f:
            if "tmp_path" in item.fixturenames:
                extra = " ({})".format(item.funcargs["tmp_path"])
            else:
                extra = ""
            f.write(rep.nodeid + extra + "\\n")
    return rep
"""


# regression: H2-B10
def test_a_hook_may_ask_for_the_values_of_fixtures(
    session: Session, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(MAKEREPORT)
    done = session("""
@pytest.mark.world(2)
def test_it(tmp_path):
    assert False
""")
    assert "1 failed in" in done.stdout, done.stdout
    lines = sorted((pytester.path / "failures").read_text().splitlines())
    assert lines[0].startswith("test_it.py::test_it") and len(lines) == 3
    assert "rank0-" in "".join(lines) and "rank1-" in "".join(lines)


# regression: H2-B17
def test_the_log_file_of_the_session_is_kept(
    session: Session, pytester: pytest.Pytester
) -> None:
    pytester.makeini("[pytest]\nlog_file = log.txt\nlog_file_level = INFO\n")
    done = session("""
import logging

def test_plain():
    logging.info("of the session")

@pytest.mark.world(2)
def test_it():
    logging.info("of a rank")

def test_plain_again():
    logging.info("at the end")
""")
    assert "3 passed in" in done.stdout, done.stdout
    log = (pytester.path / "log.txt").read_text()
    assert "of the session" in log and "at the end" in log and "of a rank" not in log


# regression: H2-B19
def test_a_folder_that_ranks_share_lives_as_long_as_the_ranks(
    session: Session, pytester: pytest.Pytester
) -> None:
    pytester.makeini("[pytest]\ntmp_path_retention_policy = failed\n")
    done = session("""
@pytest.mark.world(2)
def test_it(world, tmp_path):
    folder = world.once(lambda: tmp_path)
    if world.rank == 1:
        time.sleep(0.5)
    (folder / str(world.rank)).touch()
""")
    assert "1 passed in" in done.stdout, done.stdout
