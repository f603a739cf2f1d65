"""A test on ranks is skipped only if all ranks skip, and passes only if it has run."""

import functools
import unittest
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from gradparity.multiprocess.pytest_plugin.rank_session import FAIL, ItemResult, Phase
from gradparity.multiprocess.rank.endings import conclude, never_runs
from gradparity.tests.multiprocess.test_adopt import common
from gradparity.tests.multiprocess.test_pytest_plugin import Session, session

pytest_plugins = ["pytester"]
__all__ = ["common", "session"]

SKIPS = """
import unittest

class OwnSkip(pytest.skip.Exception): pass
class OwnCase(unittest.SkipTest): pass
class OwnXfail(pytest.xfail.Exception): pass

def skip(): pytest.skip("away")
def importorskip(): pytest.importorskip("no_such_module")
def case(): raise unittest.SkipTest("away")
def own_skip(): raise OwnSkip("away")
def own_case(): raise OwnCase("away")
def xfail(): pytest.xfail("away")
def own_xfail(): raise OwnXfail("away")
def leave(): pytest.exit("away", returncode=0)
def fail(): raise ValueError("the failure")
def late():
    time.sleep(0.3)
    fail()
def nothing(): pass

ENDS = [skip, importorskip, case, own_skip, own_case, xfail, own_xfail]
FEW = [skip, own_case, own_xfail]
"""
# regression: M1


@pytest.mark.slow
def test_a_skip_of_one_rank_hides_no_other_rank(session: Session) -> None:
    done = session(
        SKIPS
        + """
@pytest.mark.world(world_size=2)
@pytest.mark.parametrize(
    ("end", "other"),
    [*((end, fail) for end in [*ENDS, leave]), (skip, late), (xfail, late),
     (case, nothing), (own_xfail, nothing), (leave, nothing)],
)
def test_it(world, end, other):
    (end if world.rank == 1 else other)()

@pytest.mark.world(world_size=2)
def test_early_and_late_skip(world):
    if world.rank == 0:
        time.sleep(0.3)
        fail()
    case()

@pytest.mark.world(world_size=2)
def test_kinds_differ(world):
    (case if world.rank else xfail)()
"""
    )
    assert "15 failed in" in done.stdout, done.stdout
    assert done.stdout.count("ValueError: the failure") >= 10
    assert "rank 1: raised Skipped: away" in done.stdout


def test_a_skip_hides_no_rank_that_dies_or_hangs(session: Session) -> None:
    """A test fails if one rank dies or hangs, even if the other rank skips."""
    done = session(
        SKIPS
        + """
def die(): os._exit(3)
def be_killed(): os.kill(os.getpid(), 9)
def hang(): time.sleep(100)

@pytest.fixture
def set_up(world, request):
    if world.rank == 0:
        request.param()

@pytest.fixture
def torn_down(world):
    yield
    if world.rank == 1:
        die()

@pytest.mark.world(world_size=2, timeout_s=3)
@pytest.mark.parametrize("other", [die, be_killed, hang])
@pytest.mark.parametrize("set_up", [skip, xfail], indirect=True)
def test_in_setup(set_up, world, other):
    other()

@pytest.mark.world(world_size=2)
@pytest.mark.parametrize("end", [skip, xfail])
def test_in_call(world, end):
    (die if world.rank else end)()

@pytest.mark.world(world_size=2)
@pytest.mark.parametrize("end", [skip, xfail])
def test_in_teardown(torn_down, end):
    end()
"""
    )
    assert "10 failed in" in done.stdout, done.stdout
    assert done.stdout.count("rank 1: exited with code 3") >= 6


def test_what_all_ranks_skip_is_skipped(session: Session) -> None:
    done = session(
        SKIPS
        + """
@pytest.mark.world(world_size=2)
@pytest.mark.parametrize("end", ENDS)
def test_it(world, end):
    end()
"""
    )
    assert "5 skipped, 2 xfailed" in done.stdout, done.stdout


def test_what_the_teardown_of_all_ranks_skips_is_skipped(session: Session) -> None:
    done = session(
        SKIPS
        + """
@pytest.fixture
def torn_down(world, request):
    yield
    request.param()

@pytest.mark.world(world_size=2)
@pytest.mark.parametrize("torn_down", [skip, own_xfail], indirect=True)
def test_it(torn_down):
    pass
"""
    )
    assert "2 passed, 1 skipped, 1 xfailed" in done.stdout, done.stdout


def test_a_failure_has_precedence_over_skips_before_and_after_it() -> None:
    skips, failure = unittest.SkipTest("away"), ValueError("the failure")
    raised = [("test", skips), ("tearDown", failure), ("cleanup", skips)]
    with pytest.raises(ValueError, match="the failure") as caught:
        conclude(raised)
    notes = "in tearDown", "also test: SkipTest: away", "also cleanup: SkipTest: away"
    assert tuple(caught.value.__notes__) == notes
    left = conclude([raised[0], ("cleanup", unittest.SkipTest("later"))])
    assert left is not None and left.reason == "away"
    assert conclude([]) is None


def test_the_phase_that_failed_first_is_known() -> None:
    phases = tuple(
        Phase(kind, "", "", when=when, report={}, is_expected=False, followed=False)
        for when, kind in (("setup", ""), ("call", "skip"), ("teardown", FAIL))
    )
    assert ItemResult("", "", "", phases).failed == "teardown"
    assert ItemResult("skip", "", "", phases[:2]).failed is None


def test_an_assumption_outside_of_hypothesis_fails(session: Session) -> None:
    # regression: all ranks raised it, and the test passed
    done = session("""
from hypothesis.errors import UnsatisfiedAssumption

@pytest.mark.world(world_size=2)
def test_it(world):
    raise UnsatisfiedAssumption

from gradparity.multiprocess import TestCase

class TestOurs(TestCase):
    def test_it(self):
        raise UnsatisfiedAssumption
""")
    assert "2 failed" in done.stdout, done.stdout


def test_a_skip_hides_no_failure_of_setup_or_teardown(session: Session) -> None:
    done = session(
        SKIPS
        + """
@pytest.fixture
def torn_down(world, request):
    yield
    if world.rank == 0:
        request.param()

@pytest.fixture
def inner(torn_down):
    yield
    print("still torn down")

@pytest.fixture
def hiding(world):
    try:
        yield
    except ValueError:
        pass

@pytest.mark.world(world_size=2, grace_s=20)
@pytest.mark.parametrize("torn_down", FEW, indirect=True)
def test_teardown_skips(inner, world):
    if world.rank == 0:
        fail()

@pytest.mark.world(world_size=2, grace_s=20)
@pytest.mark.parametrize("torn_down", [fail], indirect=True)
@pytest.mark.parametrize("end", FEW)
def test_teardown_fails(inner, end):
    end()

@pytest.mark.world(world_size=2, grace_s=20)
@pytest.mark.parametrize("torn_down", FEW, indirect=True)
def test_teardown_skips_on_one_rank(inner):
    pass

@pytest.mark.world(world_size=2, grace_s=20)
def test_no_fixture_swallows_it(hiding):
    fail()
"""
    )
    # As in one process, the call and the teardown of a test are two results.
    says = "4 failed, 3 passed, 2 skipped, 1 xfailed, 9 errors"
    assert says in done.stdout, done.stdout
    assert done.stdout.count("ValueError: the failure") >= 7
    for kind, count in (("skip", 2), ("xfail", 1)):
        ends = f"on the teardown:\n  rank 0: {kind} away\n  rank 1: passed\n"
        assert done.stdout.count(ends) >= count, done.stdout
    assert done.stdout.count("still torn down") >= 9


OUTLIVE = """
@pytest.fixture(scope="module")
def wide():
    yield
    if dist.get_world_size() == 2:
        raise ValueError("of the teardown")

@pytest.mark.world(world_size=2)
def test_before(wide):
    pass

@pytest.mark.world(world_size=16)  # so many ranks end those that wait
@pytest.mark.skipif(SKIPS, reason="the last test")
def test_many():
    pass

@pytest.mark.world(world_size=2)
@pytest.mark.skip("the last test on these ranks")
def test_last(wide):
    pass
"""


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.few(1)
def test_fixtures_that_outlive_their_tests_hide_no_failure(
    session: Session, skips: bool
) -> None:
    done = session(OUTLIVE.replace("SKIPS", str(skips)))
    # regression: H2-A3, the error was one of a test that did not use the fixture
    assert "ERROR at teardown of test_before" in done.stdout
    assert "raised ValueError: of the teardown" in done.stdout
    assert done.returncode == 1 and " 1 error in" in done.stdout


HOOKS = """
import pytest

bad = []

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and bad:
        report.outcome, report.longrepr = "failed", bad.pop()
    return report
"""


def test_a_report_that_a_hook_fails_on_one_rank_fails(
    session: Session, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(HOOKS)
    done = session(
        """
@pytest.mark.world(world_size=2)
def test_it(world, request):
    conftest = request.config.pluginmanager.get_plugin(CONFTEST)
    if world.rank == 1:
        conftest.bad.append("the log has errors")
""".replace("CONFTEST", repr(str(pytester.path / "conftest.py")))
    )
    assert "FAILED test_it.py::test_it - rank 1: raised" in done.stdout
    assert "the log has errors" in done.stdout


def test_a_module_that_one_rank_skips_fails(session: Session) -> None:
    done = session("""
if os.environ.get("RANK") == "1":
    pytest.skip("no device here", allow_module_level=True)

@pytest.mark.world(world_size=2)
def test_it():
    pass
""")
    assert "cannot be collected on this rank" in done.stdout
    assert "no device here" in done.stdout and done.returncode == 1


def test_a_failure_shows_frames_and_leftovers_of_the_test_only(
    session: Session,
) -> None:
    done = session("""
@pytest.mark.world(world_size=2)
def test_it(world):
    if world.rank == 0:
        raise KeyboardInterrupt
    dist.barrier()

@pytest.mark.world(world_size=2)
def test_once(world):
    world.once(fails)

def fails():
    raise ValueError
""")
    assert "KeyboardInterrupt" in done.stdout and "2 failed" in done.stdout
    assert "DistError: rank 0 could not make the value: ValueError" in done.stdout
    assert "victim: rank 1: raised ValueError" in done.stdout
    assert "def once" not in done.stdout
    assert "/_pytest/" not in done.stdout
    assert "that it never waited for" not in done.stdout


def test_a_teardown_that_waits_for_others_hides_no_failure(session: Session) -> None:
    done = session("""
@pytest.fixture
def meets(world):
    yield
    dist.barrier()

@pytest.fixture
def ends(world):
    yield
    if world.rank == 0:
        os._exit(3)

@pytest.mark.world(world_size=2, timeout_s=40)
def test_waits(world, meets):
    if world.rank == 0:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))

@pytest.mark.world(world_size=2)
def test_ends(world, ends):
    assert world.rank == 1, "the cause"

@pytest.mark.world(world_size=2)
def test_all_meet(world, meets):
    raise ValueError("the cause")

from gradparity.multiprocess import TestCase

class TestOurs(TestCase):
    def tearDown(self):
        dist.barrier()

    def test_waits(self):
        if self.rank == 0:
            raise KeyError("the cause")
        dist.all_reduce(torch.ones(1))
""")
    assert "4 failed in" in done.stdout, done.stdout
    assert "root cause: rank 0: raised ValueError: the cause" in done.stdout
    assert "root cause: rank 0: raised KeyError: 'the cause'" in done.stdout
    assert "root cause: rank 0: raised AssertionError: the cause" in done.stdout
    assert "victim: rank 1: waiting in a collective after" in done.stdout
    assert "hung" not in done.stdout


@pytest.mark.parametrize("mark", ["", "@unittest.expectedFailure"])
def test_a_failure_of_a_class_of_unittest_is_reported_before_its_teardown(
    session: Session, mark: str
) -> None:
    done = session(f"""
import unittest

class TestPlain(unittest.TestCase):
    def tearDown(self):
        dist.barrier()

    @pytest.mark.world(2, timeout_s=30)
    {mark}
    def test_waits(self):
        if dist.get_rank() == 0:
            raise KeyError("the cause")
        dist.all_reduce(torch.ones(1))
""")
    assert "root cause: rank 0: raised KeyError: 'the cause'" in done.stdout
    assert "victim: rank 1: waiting in a collective after" in done.stdout
    assert "hung" not in done.stdout


def test_a_skip_hides_no_failure_in_a_class(session: Session) -> None:
    done = session(
        SKIPS
        + """
from gradparity.multiprocess import TestCase

class TestTearDown(TestCase):
    def tearDown(self):
        if self.rank == 1:
            fail()

    def test_skips(self):
        self.skipTest("away")

    def test_skips_by_pytest(self):
        skip()

    @unittest.expectedFailure
    def test_expected(self):
        fail()

class TestRanks(TestCase):
    def test_one_fails(self):
        (case if self.rank else late)()

    def test_one_skips(self):
        if self.rank:
            skip()

    def test_all_skip(self):
        skip()

    @unittest.expectedFailure
    def test_expected(self):
        fail()

    def test_leaves(self):
        raise SystemExit(0)
"""
    )
    # As in one process, pytest reports the tearDown of a skipped test as an error.
    counts = "4 failed, 3 skipped, 1 xfailed, 2 errors"
    assert counts in done.stdout, done.stdout


# regression: M13
def test_healthy_ranks_are_torn_down(session: Session) -> None:
    done = session("""
from gradparity.multiprocess import TestCase

@pytest.fixture
def torn_down(world):
    yield
    print("teardown of the fixture on", world.rank)

@pytest.mark.world(world_size=2, grace_s=2)
def test_it(world, torn_down):
    if world.rank == 1:
        raise ValueError("the failure")
    total(world)

class TestOurs(TestCase):
    grace_s = 2.0

    def tearDown(self):
        print("tearDown on", self.rank)

    def test_it(self):
        self.addCleanup(lambda: print("cleanup on", self.rank))
        if self.rank == 1:
            raise ValueError("the failure")
        total(self)
""")
    assert "2 failed in" in done.stdout
    for rank in (0, 1):
        assert f"teardown of the fixture on {rank}\n" in done.stdout
        assert f"tearDown on {rank}\ncleanup on {rank}\n" in done.stdout
    assert done.stdout.count("root cause: rank 1: raised ValueError: the failure") == 2


# regression: M2
UNRUN = """
import asyncio, functools, types
from hypothesis import given, strategies as st

def plain(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)
    return wrapper

def awaited(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return asyncio.run(fn(*args, **kwargs))
    return wrapper

class Later:
    def __await__(self):
        yield

@types.coroutine
def old_coroutine():
    yield
"""


@pytest.mark.slow
def test_a_body_that_never_runs_fails(session: Session) -> None:
    done = session(
        UNRUN
        + """
@pytest.mark.world(2)
@plain
async def test_coroutine(world):
    raise AssertionError

@pytest.mark.world(2)
@plain
async def test_async_generator(world):
    yield

@pytest.mark.world(2)
@plain
def test_generator(world):
    yield

@pytest.mark.world(2)
@pytest.mark.parametrize("value", [Later, old_coroutine])
def test_returns(world, value):
    return value()

@pytest.mark.world(2)
def test_lazy(world):
    return (fail() for _ in range(3))

@pytest.mark.world(2)
def test_on_one_rank(world):
    return map(int, "1") if world.rank else None

@pytest.mark.world(2)
@given(n=st.integers(0, 1))
async def test_drawn(world, n):
    raise AssertionError

@pytest.fixture
async def later(world):
    return 1

@pytest.mark.world(2)
def test_of_fixture(later):
    pass

@pytest.mark.world(2)
@awaited
async def test_awaited(world):
    await asyncio.sleep(0)
    assert total(world) == 1

from gradparity.multiprocess import TestCase

class TestOurs(TestCase):
    async def test_coroutine(self):
        raise AssertionError

    test_partial = functools.partialmethod(test_coroutine)

    @plain
    def test_generator(self):
        yield

class TestSetUp(TestCase):
    async def setUp(self):
        raise AssertionError

    def test_it(self):
        pass
"""
    )
    assert "10 failed, 1 passed, 3 errors" in done.stdout, done.stdout
    assert "the test returned a coroutine, which nothing awaits" in done.stdout
    assert "an async generator, which nothing awaits" in done.stdout
    assert "the test returned a map, over which nothing iterates" in done.stdout
    # pytest's own words since 8.4, and ours before.
    refused = "requested an async fixture 'later'", "fixture `later` returned a corou"
    assert any(words in done.stdout for words in refused)
    assert "test_generator returned a generator" in done.stdout
    assert "setUp returned a coroutine" in done.stdout
    assert "'test_coroutine' was never awaited" not in done.stdout


def test_a_body_of_a_class_of_unittest_that_never_runs_fails(session: Session) -> None:
    done = session("""
import functools, unittest

class TestPlain(unittest.TestCase):
    @pytest.mark.world(2)
    def test_it(self):
        def body():
            raise AssertionError
            yield
        return body()
""")
    assert "1 failed" in done.stdout, done.stdout
    assert "test_it returned a generator, over which nothing iterates" in done.stdout


@pytest.mark.parametrize(("body", "kind"), [("pass", "coroutine"), ("yield", "async")])
def test_what_plainly_never_runs_fails_its_test_alone(
    session: Session, body: str, kind: str
) -> None:
    done = session(f"""
@pytest.mark.world(2)
async def test_it(world):
    {body}

@pytest.mark.world(1)
def test_other(world):
    pass
""")
    assert "1 passed, 1 error" in done.stdout
    assert f"test_it is a{'n' * (kind == 'async')} {kind}" in done.stdout
    assert "make it a plain function" in done.stdout


TORCHS = """
import functools, unittest
import torch.testing._internal.common_distributed as common

class TestProcesses(common.MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_one_skips(self):
        if self.rank:
            raise unittest.SkipTest("away")

    def test_one_skips_by_code(self):
        if self.rank:
            sys.exit(common.TEST_SKIPS["multi-gpu-2"].exit_code)
        time.sleep(0.3)
        raise ValueError

    def test_all_skip(self):
        sys.exit(common.TEST_SKIPS["multi-gpu-2"].exit_code)

    async def test_coroutine(self):
        raise AssertionError

class TestThreads(common.MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_generator(self):
        yield

    def test_one_thread_skips(self):
        if self.rank:
            raise unittest.SkipTest("away")

    def test_all_threads_skip(self):
        raise unittest.SkipTest("away")
"""


@pytest.mark.slow
def test_torchs_classes_hide_nothing(common: Any, session: Session) -> None:
    done = session(f"import sys\n{TORCHS}", "--gradparity-adopt")
    assert "5 failed, 2 skipped" in done.stdout, done.stdout
    assert "ranks [1] skip the test, and others pass it" in done.stdout
    assert done.stdout.count("so its code has not run") >= 2


def test_each_kind_is_recognised_behind_partials_and_methods() -> None:
    async def coroutine() -> None: ...
    async def async_generator() -> AsyncIterator[None]:
        yield

    def generator() -> Iterator[None]:
        yield

    def plain() -> None: ...

    fns = (coroutine, async_generator, generator, plain)
    for form in (lambda fn: fn, functools.partial, lambda fn: fn.__get__(1)):
        kinds = [never_runs(form(fn)) for fn in fns]
        assert kinds == ["a coroutine", "an async generator", "a generator", ""]


def test_subtests_end_alike_on_all_ranks(session: Session) -> None:
    """A subtest that one rank skips was shown as passed, and its failure as well."""
    done = session("""
@pytest.mark.world(world_size=2)
def test_skips(subtests, world):
    with subtests.test("one"):
        if world.rank == 1:
            pytest.skip("no device")

@pytest.mark.world(world_size=2)
def test_leaves_out(subtests, world):
    if world.rank == 1:
        with subtests.test("two"):
            pass

@pytest.mark.xfail
@pytest.mark.world(world_size=2)
def test_expects(subtests, world):
    with subtests.test("three"):
        assert world.rank == 0

@pytest.mark.world(world_size=2)
def test_agrees(subtests, world):
    with subtests.test("four"):
        pytest.skip("no device")
""")
    assert "passed on rank 0, skipped on rank 1" in done.stdout
    assert "1 failed" in done.stdout and "1 xfailed" in done.stdout


def test_a_subtest_that_fails_ends_no_rank(session: Session) -> None:
    """After a failed subtest, other ranks may take longer than after a failed test."""
    done = session("""
@pytest.mark.world(world_size=2)
def test_it(subtests, world):
    with subtests.test("one"):
        assert world.rank == 1
    if world.rank == 1:
        time.sleep(1.5)
    dist.barrier()
    with subtests.test("other"):
        assert world.rank == 0
""")
    assert "contains 2 failed subtests" in done.stdout
    assert "[one]" in done.stdout and "[other]" in done.stdout
    assert "killed because" not in done.stdout


# regression: H28-6
def test_values_of_modules_that_only_ranks_have_imported(session: Session) -> None:
    """Their texts arrive, and the outcome of the test is its own."""
    done = session("""
import warnings

BODY = "import enum\\nclass W(UserWarning): pass\\nclass E(enum.Enum): A = 1\\n"

@pytest.fixture
def made(request, tmp_path, monkeypatch):
    name = f"made_by_{request.function.__name__}"
    (tmp_path / f"{name}.py").write_text(BODY)
    monkeypatch.syspath_prepend(tmp_path)
    return __import__(name)

@pytest.mark.world(2)
def test_warns(made):
    warnings.warn("of the rank", made.W)

@pytest.mark.world(2)
def test_records(made, record_property):
    cyclic = [made.E.A]
    cyclic.append(cyclic)
    record_property("kind", cyclic)

@pytest.mark.world(2)
@pytest.mark.xfail(strict=True)
def test_expects(made, record_property):
    record_property("kind", made.E.A)
    assert not made
""")
    assert "2 passed, 1 xfailed, 1 warning in" in done.stdout, done.stdout
    assert "UserWarning: made_by_test_warns.W: of the rank" in done.stdout


# regression: H28-11
def test_what_rank_0_raises_in_once_is_raised_on_all_ranks(session: Session) -> None:
    done = session("""
def skips():
    pytest.skip("no network")

def fails():
    raise ValueError("bad data")

def fails_in_its_own_way():
    class Local(ValueError):
        def __reduce__(self):
            raise TypeError
    raise Local

@pytest.fixture
def value(world):
    return world.once(skips)

@pytest.mark.world(2)
def test_skips(value):
    pass

@pytest.mark.world(2)
@pytest.mark.parametrize("make", [
    lambda: pytest.importorskip("no_such_module"),
    lambda: pytest.xfail("not yet"),
])
def test_ends(world, make):
    world.once(make)

@pytest.mark.world(2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_expects(world):
    world.once(fails)

@pytest.mark.world(2)
def test_catches(world):
    with pytest.raises(ValueError, match="bad data"):
        world.once(fails)
    with pytest.raises(ValueError if world.rank == 0 else dist.DistError):
        world.once(fails_in_its_own_way)

def exits():
    raise SystemExit(3)

@pytest.mark.world(2)
def test_exits(world):
    world.once(exits)
""")
    assert "1 failed, 1 passed, 2 skipped, 2 xfailed in" in done.stdout, done.stdout
    assert "FAILED test_it.py::test_exits - rank 0: raised SystemExit" in done.stdout


# regression: H28-26, H28-27
def test_the_summary_names_each_error_and_notes_come_once(session: Session) -> None:
    done = session("""
@pytest.fixture
def own(world):
    yield
    raise KeyError("of the teardown")

@pytest.mark.world(1)
@pytest.mark.xfail(raises=AssertionError)
def test_expects(own):
    assert False

@pytest.mark.world(2)
def test_notes():
    error = ValueError("of the test")
    error.add_note("see the " + "manual")
    raise error
""")
    assert "ERROR test_it.py::test_expects - Failed: rank 0: KeyError" in done.stdout
    (_, own) = done.stdout.split("root cause: rank ")
    assert own.count("see the manual") == 1


# regression: H28-28
@pytest.mark.parametrize("shows", ["all", "no"])
def test_output_of_ranks_is_shown_as_asked(session: Session, shows: str) -> None:
    done = session(
        """
@pytest.mark.world(2)
def test_it(world):
    print("from", "rank", world.rank)
    raise ValueError
""",
        f"--show-capture={shows}",
    )
    assert "rank 0: raised ValueError" in done.stdout
    assert ("from rank 1" in done.stdout) is (shows == "all")
