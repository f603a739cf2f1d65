"""Ranks find the tests and fixtures of several files as the parent does."""

from pathlib import Path

import pytest

from gradparity.tests.multiprocess.test_pytest_plugin import HEAD, PRELOADED

pytest_plugins = ["pytester"]
assert PRELOADED  # sessions of this process find torch imported

CONFTEST = """
import pytest, torch

@pytest.fixture(autouse=True)
def keeps_the_dtype():
    yield
    assert torch.get_default_dtype() == torch.float32

@pytest.fixture
def number():
    return 3
"""

TEST = """
@pytest.mark.world(2)
def test_it(number):
    assert number == 3
    if __name__.endswith("second"):
        torch.set_default_dtype(torch.float64)
"""


def files(folder: Path, **texts: str) -> None:
    """Write Python files into a folder."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)


# regression: H2-A1
def test_each_file_has_the_fixtures_of_its_conftest(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]")  # the root folder is above the conftests
    test = HEAD + TEST
    files(pytester.path / "a", conftest=CONFTEST, test_first=test, test_second=test)
    files(pytester.path / "b", conftest=CONFTEST, test_third=test)
    done = pytester.runpytest_inprocess("-q", "-rA", "a", "b")
    done.assert_outcomes(passed=3, errors=1)
    done.stdout.fnmatch_lines(["ERROR a/test_second.py::test_it* - rank*"])


PACKAGE = """
import os, pytest

@pytest.fixture(scope="package")
def counted(tmp_path_factory):
    with open(tmp_path_factory.getbasetemp().parent / "ups", "a") as file:
        file.write(".")
    yield
"""

USES = """
@pytest.mark.world(1)
def test_uses(counted, tmp_path_factory):
    assert (tmp_path_factory.getbasetemp().parent / "ups").read_text() == "."
"""


# regression: H2-A1
def test_a_fixture_of_a_package_outlives_its_files(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]")
    files(
        pytester.path / "a",
        __init__="",
        conftest=PACKAGE,
        test_first=HEAD + USES,
        test_second=HEAD + USES,
    )
    pytester.runpytest_inprocess("-q").assert_outcomes(passed=2)


# regression: H2-B9
@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", "ci/pytest.ini", "tests"),
        ("--rootdir=ci", "tests"),
        ("-c", "ci/pytest.ini", "--pyargs", "package.tests"),
    ],
    ids=["config", "rootdir", "pyargs"],
)
def test_files_outside_of_the_root_folder(
    pytester: pytest.Pytester, arguments: tuple[str, ...]
) -> None:
    (pytester.path / "ci").mkdir()
    (pytester.path / "ci" / "pytest.ini").write_text("[pytest]")
    files(pytester.path / "package", __init__="")
    test = HEAD + TEST + "\nclass TestIt:\n    test_it = staticmethod(test_it)\n"
    for folder in ("tests", "package/tests"):
        files(pytester.path / folder, __init__="", conftest=CONFTEST, test_outside=test)
    pytester.syspathinsert()
    done = pytester.runpytest_inprocess("-q", *arguments)
    done.assert_outcomes(passed=2)


# regression: h42-4
@pytest.mark.parametrize("name", ["a[b]", "we[ird] dir ü", "a::b"])
def test_any_name_of_a_folder(pytester: pytest.Pytester, name: str) -> None:
    """An argument of pytest would end at its `[` or `::`."""
    pytester.makeini("[pytest]")
    folder = pytester.path / name
    files(folder, conftest=CONFTEST, **{"test_[it]": HEAD + TEST})
    files(pytester.path / "plain", conftest=CONFTEST, test_plain=HEAD + TEST)
    done = pytester.runpytest_inprocess("-q")
    done.assert_outcomes(passed=2)


# regression: H2-A4
def test_a_file_that_ranks_cannot_import_fails_its_own_test(
    pytester: pytest.Pytester,
) -> None:
    fails = 'if "RANK" in os.environ:\n    raise ValueError("on ranks only")\n'
    files(pytester.path, test_first=HEAD + TEST, test_next=HEAD + fails + TEST)
    files(pytester.path, conftest=CONFTEST)
    done = pytester.runpytest_inprocess("-q", "-rA")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["PASSED test_first.py::test_it*"])
    done.stdout.fnmatch_lines(["*ValueError: on ranks only*"])
