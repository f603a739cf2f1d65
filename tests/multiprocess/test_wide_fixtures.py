"""Fixtures that outlive their tests on ranks are torn down, and hide no failure."""

import re
from pathlib import Path

import pytest

from gradparity.tests.multiprocess.test_files_on_ranks import files
from gradparity.tests.multiprocess.test_pytest_plugin import HEAD, Session, session
from gradparity.tests.multiprocess.test_ranks_under_torchrun import Torchrun, torchrun

pytest_plugins = ["pytester"]
__all__ = ["session", "torchrun"]

SERVER = """
import threading

@pytest.fixture(scope="session")
def server(world_of):
    yield
    raise ValueError("the server reported an error")

@pytest.fixture(scope="session")
def world_of():
    with open("lines", "a") as file:
        file.write("up\\n")
    yield
    with open("lines", "a") as file:
        file.write("down\\n")

def leave_a_thread():
    threading.Thread(target=time.sleep, args=[9], daemon=True).start()

def leave_a_collective():
    dist.all_reduce(torch.ones(1), async_op=True)

def fail():
    raise KeyError("of the test")

@pytest.mark.world(2)
@pytest.mark.parametrize(
    "end", [dist.destroy_process_group, leave_a_thread, leave_a_collective, fail, int]
)
def test_it(server, end):
    end()

@pytest.mark.world(1)
def test_last():
    pass
"""


# regression: H2-A2
def test_ranks_that_are_replaced_end_their_fixtures(
    session: Session, pytester: pytest.Pytester
) -> None:
    done = session(SERVER)
    assert "1 failed, 5 passed, 5 errors" in done.stdout, done.stdout
    for end in ("destroy_process_group", "leave_a_thread", "leave_a_collective"):
        assert f"{end}] - rank " in done.stdout
    lines = (pytester.path / "lines").read_text().split()
    assert lines.count("up") == lines.count("down") == 10


KILLED = """
import subprocess

@pytest.fixture(scope="module")
def wide():
    yield
    raise ValueError("of the fixture")

@pytest.mark.world(2)
def test_before(world, wide):
    if world.rank == 1:
        status = f"/proc/{os.getpid()}/status"
        waits = "while [ ! -e go ]; do sleep 0.05; done"
        lives = f"grep -qs '^State:.*[^Z] (' {status}"
        ends = f"kill -9 {os.getpid()}; while {lives}; do sleep 0.05; done"
        # the parent hears of the end from the process that started the rank
        kills = f"{waits}; {ends}; sleep 0.4; touch killed"
        subprocess.Popen(["sh", "-c", kills], start_new_session=True)

@pytest.mark.world(2)
def test_after(world):
    pass
"""


def test_a_rank_that_ends_between_two_tests_is_an_error_of_the_first(
    session: Session, pytester: pytest.Pytester
) -> None:
    """Its fixtures are lost; those of the other ranks end."""
    pytester.makeconftest("""
        import pathlib, time, pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(item):
            if item.name == "test_after":
                pathlib.Path("go").touch()
                ends = time.monotonic() + 30
                while not pathlib.Path("killed").exists() and time.monotonic() < ends:
                    time.sleep(0.05)
    """)
    done = session(KILLED)
    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert "ERROR at teardown of test_before" in done.stdout
    assert "world of 2: rank 1: killed by SIGKILL" in done.stdout
    assert "also failed: rank 0: raised ValueError: of the fixture" in done.stdout


# regression: H2-A2
def test_a_fixture_of_ranks_that_fail_may_end_with_a_barrier(session: Session) -> None:
    done = session("""
@pytest.fixture(scope="module", autouse=True)
def meets():
    yield
    dist.barrier()
    print("met")
    raise ValueError("after the barrier")

@pytest.mark.world(2)
def test_it(world):
    assert world.rank == 0

@pytest.mark.world(2)
@pytest.mark.skip("the last test of the fixture")
def test_other(world):
    pass
""")
    assert "1 failed, 1 skipped, 1 error" in done.stdout, done.stdout
    assert "raised ValueError: after the barrier" in done.stdout


# regression: H2-A2
def test_ranks_that_hang_or_die_end_no_fixture(session: Session) -> None:
    done = session("""
@pytest.fixture(scope="module", autouse=True)
def wide():
    yield
    raise ValueError("of the last test")

@pytest.mark.world(2, timeout_s=1)
def test_hangs(world):
    if world.rank == 1:
        time.sleep(100)

@pytest.mark.world(2)
def test_dies(world):
    if world.rank == 1:
        os._exit(3)

@pytest.mark.world(1, timeout_s=1)
def test_hangs_alone():
    time.sleep(100)
""")
    assert "3 failed, 1 error" in done.stdout, done.stdout
    assert "ERROR test_it.py::test_dies" in done.stdout  # the last on its ranks


FIRST = """
@pytest.fixture(scope="module")
def wide(world_size):
    yield
    END

@pytest.fixture(scope="module")
def world_size():
    return dist.get_world_size()

@pytest.mark.world(2)
def test_uses(wide):
    pass

@pytest.mark.world(2)
@pytest.mark.skip("the last test of the fixture")
def test_skipped(wide):
    pass
"""

NEXT = """
@pytest.mark.world(2)
@pytest.mark.xfail
def test_innocent(world):
    assert total(world) == 1
"""


# regression: H2-A3
@pytest.mark.parametrize(
    ("end", "says", "options"),
    [
        ('raise ValueError("boo")', "raised ValueError: boo", ()),
        ("os._exit(3)", "exited with code 3", ()),
        ("os._exit(3)", "exited with code 3", ("-n1",)),
    ],
    ids=["raises", "dies", "dies under xdist"],
)
def test_a_fixture_of_tests_before_fails_no_other_test(
    pytester: pytest.Pytester, end: str, says: str, options: tuple[str, ...]
) -> None:
    first = HEAD + FIRST.replace("END", end)
    files(pytester.path, test_first=first, test_next=HEAD + NEXT)
    done = pytester.runpytest_inprocess("-q", "-rA", *options)
    done.assert_outcomes(passed=1, skipped=1, errors=1, xpassed=1)
    done.stdout.fnmatch_lines(["ERROR test_first.py::test_uses*"])
    done.stdout.fnmatch_lines([f"*root cause: rank ?: {says}*"])


TORCHRUN = """
@pytest.fixture(scope="session")
def wide():
    yield
    raise ValueError("boo")

@pytest.mark.world(2)
def test_fails(wide, world):
    assert world.rank == 0

@pytest.mark.world(2)
def test_passes(wide):
    pass

@pytest.mark.world(2, isolation="process")
def test_alone():
    pass

@pytest.mark.world(2)
def test_last(wide):
    pass
"""


# regression: H2-A2
@pytest.mark.slow
def test_ranks_of_torchrun_end_their_fixtures(
    torchrun: Torchrun, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(HEAD + TORCHRUN)
    done = torchrun("-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "test_it.py")
    assert "1 failed, 3 passed, 3 errors" in done.stdout, done.stdout


@pytest.mark.parametrize("isolation", ["pool", "process"])
def test_the_session_of_a_rank_ends_on_every_kind_of_ranks(
    session: Session, pytester: pytest.Pytester, isolation: str
) -> None:
    pytester.makeconftest("""
import os

def pytest_sessionfinish():
    if "GRADPARITY_WORLD" in os.environ:
        raise ValueError("the plugin reported an error")
""")
    done = session(f"""
@pytest.mark.world(2, isolation="{isolation}")
def test_it(world):
    pass
""")
    assert done.returncode == 1
    says = r"rank \d: raised ValueError: the plugin reported an error"
    assert re.search(says, done.stdout), done.stdout


SETTINGS = """
import asyncio
from torch._subclasses.fake_tensor import FakeTensorMode

@pytest.fixture(scope="module", autouse=True)
def earlier():
    os.environ["EARLIER"] = "1"  # which this fixture does not undo
    yield

@pytest.fixture(scope="class")
def narrow():
    torch.set_num_threads(1)
    yield

@pytest.fixture(scope="session")
def later():
    os.environ["LATER"] = "here"
    torch.set_default_dtype(torch.float64)
    yield
    assert os.environ.pop("LATER") == "here"
    torch.set_default_dtype(torch.float32)

@pytest.fixture(scope="module")
def lazy():
    return torch.nn.Linear(2, 2)

@pytest.fixture(scope="class")
def fake():
    with FakeTensorMode() as mode:
        yield mode

@pytest.fixture
def future():
    loop = asyncio.new_event_loop()
    yield loop.create_future()
    loop.close()

@pytest.mark.world(2)
class TestA:
    def test_sets(self, narrow):
        pass

    def test_sets_for_all(self, later):
        pass

@pytest.mark.world(2)
def test_another_fixture_has_ended():
    assert torch.get_default_dtype() is torch.float64
    assert os.environ["LATER"] == "here" and os.environ["EARLIER"] == "1"

@pytest.mark.world(2)
def test_makes_a_wide_fixture(request, monkeypatch, capsys):
    monkeypatch.setenv("OF_THE_TEST", "1")
    with torch.no_grad():
        request.getfixturevalue("lazy")

@pytest.mark.world(2)
def test_nothing_of_that_test_stays(lazy):
    print("the stream is open")
    assert torch.is_grad_enabled() and "OF_THE_TEST" not in os.environ

def test_sets_in_the_parent():
    os.environ["OF_THE_PARENT"] = "1"

@pytest.mark.world(2)
class TestB:
    def test_fake(self, fake):
        assert torch.ones(2).sum().shape == ()

@pytest.mark.world(2)
def test_what_the_parent_has_set_stays():
    assert os.environ["OF_THE_PARENT"] == "1"

@pytest.mark.world(2)
def test_a_future_need_not_be_awaited(future):
    future.set_result(1)
"""
OF_ANOTHER_FILE = """
import os
import pytest, torch

@pytest.mark.world(2)
def test_what_the_first_module_has_set_is_undone(later):
    assert "EARLIER" not in os.environ and os.environ["LATER"] == "here"
    assert torch.get_default_dtype() is torch.float64
"""


# regression: H28-1, H28-2, H28-8, H28-9, H28-15
def test_each_fixture_keeps_and_undoes_only_its_own_settings(
    session: Session, pytester: pytest.Pytester
) -> None:
    fixture = SETTINGS.partition('@pytest.fixture(scope="session")')[2]
    later = '@pytest.fixture(scope="session")' + fixture.partition("\n@pytest")[0]
    pytester.makeconftest("import os, pytest, torch\n\n" + later)
    pytester.makepyfile(test_z=OF_ANOTHER_FILE)
    done = session(SETTINGS.replace(later, ""), ".")
    assert "10 passed" in done.stdout, done.stdout


REQUESTED = """
@pytest.fixture(scope="module")
def narrow(request):
    os.environ["NARROW"] = "1"
    request.getfixturevalue("wide")
    torch.set_default_dtype(torch.float64)

@pytest.fixture(scope="module")
def fails(request):
    os.environ["OF_A_FAILURE"] = "1"
    request.getfixturevalue("wide")
    raise ValueError("after the wide one")

@pytest.mark.world(2)
def test_fails(request):
    with pytest.raises(ValueError, match="after the wide one"):
        request.getfixturevalue("fails")

@pytest.mark.world(2)
def test_it(narrow):
    assert os.environ["WIDE"] == os.environ["NARROW"] == "1"
    assert "OF_A_FAILURE" not in os.environ
"""
OF_THE_WIDER = """
import os
import pytest, torch

@pytest.mark.world(2)
def test_later(wide):
    assert os.environ["WIDE"] == "1" and "NARROW" not in os.environ
    assert torch.get_default_dtype() is torch.float32
"""


# regression: H31-H2
def test_settings_of_a_fixture_outlive_a_narrower_one_that_requests_it(
    session: Session, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest("""
        import os, pytest

        @pytest.fixture(scope="session")
        def wide():
            os.environ["WIDE"] = "1"
            yield
            del os.environ["WIDE"]
    """)
    pytester.makepyfile(test_z=OF_THE_WIDER)
    done = session(REQUESTED, ".")
    assert "3 passed in" in done.stdout, done.stdout


PARAMETERS = """
@pytest.fixture(scope="module", params=["a", "b"])
def wide(request):
    os.environ["WIDE"] = request.param

@pytest.mark.world(2)
def test_it(wide, request):
    assert os.environ["WIDE"] == request.node.callspec.params["wide"]
"""


# regression: H31-H3
def test_a_fixture_with_parameters_leaves_no_settings(
    session: Session, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_z="""
        import os, pytest

        @pytest.mark.world(2)
        def test_later():
            assert "WIDE" not in os.environ
    """
    )
    done = session(PARAMETERS, ".")
    assert "3 passed in" in done.stdout, done.stdout
