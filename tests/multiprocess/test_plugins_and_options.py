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


OPTIONS = """
import argparse, enum

class Mode(enum.Enum):
    A = "a"
    B = "b"

class Size:
    def __init__(self, text):
        self.n = int(text)

def made(text):
    return lambda: text

def pytest_addoption(parser):
    parser.addoption("--model", required=True)
    parser.addoption("--mode", type=Mode, default=Mode.A)
    parser.addoption("--other", type=Mode, default=Mode.A)
    parser.addoption("--size", type=made, action="append")
    parser.addoption("--pair", type=Size, nargs=2)
    parser.addoption("--file", type=argparse.FileType(), nargs="?", const="c")
    parser.addoption("--kind", action="store_const", const=Mode.B)
"""


# regression: H28-3, H28-20
def test_ranks_parse_the_options_that_no_pickle_takes(
    session: Session, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(OPTIONS)
    pytester.makeini("[pytest]\naddopts = --mode b --size 1\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--pair 3 4")
    (pytester.path / "data").write_text("of the file")
    options = ("--model", "m", "--size=2", "--file", "data", "--kind")
    done = session(
        """
def check(config):
    value = config.getoption
    assert value("model") == "m" and value("kind").name == "B"
    assert value("mode").name == "B" and value("other").name == "A"
    assert [each() for each in value("size")] == ["1", "2"]
    assert [each.n for each in value("pair")] == [3, 4]
    with value("file") as file:
        assert file.read() == "of the file"

def test_plain(request):
    check(request.config)

@pytest.mark.world(2)
def test_it(request):
    check(request.config)
""",
        *options,
    )
    assert "2 passed in" in done.stdout, done.stdout


PLUGIN = """
import enum

class Mode(enum.Enum):
    A = "a"
    B = "b"

def pytest_addoption(parser):
    parser.addoption("--mode", type=Mode, default=Mode.A)
    parser.addoption("--other", type=Mode, default=Mode.A)
    parser.addoption("--model", required=True, action="append")
"""
OF_A_PLUGIN = """
@pytest.mark.world(2)
def test_it(request):
    value = request.config.getoption
    assert value("--mode").name == "B" and value("--other").name == "A"
    assert value("--model") == ["m"]
"""


# regression: H31-H1
@pytest.mark.parametrize("where", ["args", "ini"])
def test_ranks_parse_the_options_of_a_plugin_that_is_named(
    session: Session, pytester: pytest.Pytester, where: str
) -> None:
    pytester.makepyfile(plug=PLUGIN)
    pytester.syspathinsert()
    options = ["--mode=b", "--model=m"]
    if where == "ini":
        pytester.makeini("[pytest]\naddopts = -p plug\n")
    else:
        options += ["-p", "plug"]
    done = session(OF_A_PLUGIN, *options)
    assert "1 passed in" in done.stdout, done.stdout


# regression: H31-H1
def test_options_of_a_plugin_object_fail_no_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        plug=PLUGIN.replace("required=True, ", ""),
        test_it="import pytest\n\n@pytest.mark.world(2)\ndef test_it(): pass\n",
    )
    options = ["-q", "-p", "no:cacheprovider", "--mode=b", "--model=m"]
    main = f"import plug, pytest\npytest.main({options}, plugins=[plug])\n"
    done = pytester.runpython(pytester.makepyfile(main=main))
    done.assert_outcomes(passed=1)


# regression: H31-H4
def test_options_of_the_environment_win_on_ranks_over_the_ini_file(
    session: Session, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(PLUGIN)
    pytester.makeini("[pytest]\naddopts = --mode=a\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--mode=b")
    done = session(OF_A_PLUGIN, "--model=m")
    assert "1 passed in" in done.stdout, done.stdout


ACTIONS = """
import argparse, enum

class Mode(enum.Enum):
    A = "a"
    B = "b"

class Add(argparse.Action):
    def __call__(self, parser, namespace, values, flag=None):
        before = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*before, Mode(values)])

def pytest_addoption(parser):
    add = parser.addoption
    add("--a", action="store_const", const=Mode.A, dest="kind")
    add("--b", action="store_const", const=Mode.B, dest="kind")
    add("--add", action=Add)
    add("--with-a", action="append_const", const=Mode.A, dest="parts")
    add("--with-b", action="append_const", const=Mode.B, dest="parts")
    add("--many", type=Mode, nargs="+", action="append")
"""


# regression: H31-H5
def test_constants_and_actions_of_options_are_the_same_on_ranks(
    session: Session, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(ACTIONS)
    lists = ("--many", "a", "b", "--many", "b", "--with-a", "--with-b", "--with-a")
    done = session(
        """
@pytest.mark.world(2)
def test_it(request):
    value = request.config.getoption
    assert value("kind").name == "A"
    assert [each.name for each in value("add")] == ["B", "A"]
    assert [each.name for each in value("parts")] == ["A", "B", "A"]
    assert [[each.name for each in part] for part in value("many")] == [
        ["A", "B"], ["B"]
    ]
""",
        *("--b", "--a", "--add=b", "--add", "a", *lists),
    )
    assert "1 passed in" in done.stdout, done.stdout


# regression: H28-19
def test_a_fixture_finds_its_test_among_those_of_the_session(
    session: Session, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest("""
        import pytest

        @pytest.fixture(scope="session")
        def names(request):
            return {item.name for item in request.session.items}
    """)
    body = """
import pytest

@pytest.mark.world(2)
def test_{0}(names):
    assert any(name.startswith("test_{0}") for name in names)
"""
    pytester.makepyfile(test_b=body.format("b"))
    done = session(body.format("a"), "test_b.py")
    assert "2 passed in" in done.stdout, done.stdout


# regression: h42-9
def test_pdb_without_a_terminal_says_why_it_does_not_open(session: Session) -> None:
    test = """
@pytest.mark.world(2)
def test_fails(world):
    assert world.rank == 0

@pytest.mark.world(2)
def test_passes(world):
    pass
"""
    says = "no debugger: the standard input of pytest is not a terminal"
    assert session(test, "--pdb").stdout.count(says) == 1
    assert says not in session(test).stdout
