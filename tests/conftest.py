"""Fixtures of several test files, most made once a session for all workers."""

import gc
import importlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

import gradparity
from gradparity.conformance.report.records import Report, read_report
from gradparity.multiprocess import Cluster
from gradparity.multiprocess.parent.slots import visible_gpus
from gradparity.tests.extras import fail_without

if TYPE_CHECKING:  # they import torch, which xdist's controller does not need
    from gradparity.conformance import Runner
    from gradparity.tests.scripts import Scripts

Once = Callable[[str, Callable[[Path], object]], Path]
TESTED = ("gradparity.scaler:GradScaler", "torch.amp:GradScaler")
SCENARIOS = ("single/1/fp32/sgd/inf@r0s1:last/steps=4", "tp/2/fp32/sgd/none/steps=4")


def pytest_configure() -> None:
    """Let children receive ctrl-C, even if the session runs in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection during imports, and exempt all imported objects."""
    # A pass over torch and thousands of tests takes a quarter of a second.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before those that -m leaves out are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as slow, except those that the marker ``few`` keeps, evenly spread."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("few")
        assert marker is not None
        n_kept, last = marker.args[0], len(of_test) - 1
        kept = {round(i * last / max(1, n_kept - 1)) for i in range(n_kept)}
        for number, item in enumerate(of_test):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail tests that lack a package; skip those that lack a GPU."""
    fail_without(item)
    marker = item.get_closest_marker("gpu")
    if marker is not None:
        wanted, there = marker.kwargs.get("count", 1), len(visible_gpus())
        if there < wanted:
            pytest.skip(f"needs {wanted} CUDA devices, {there} visible")


@pytest.fixture(scope="session")
def warm_socket(once: Once) -> str:
    """Start the server of ``warm_python``, which imports torch; return its socket."""
    from gradparity.tests import warm_python

    session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()

    def serve(folder: Path) -> None:
        server = [sys.executable, "-P", warm_python.__file__, "serve"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        env.pop("PYTHONPATH", None)  # the programs have their own
        subprocess.run(
            [*server, str(folder / "socket"), str(session)], check=True, env=env
        )

    return str(once("warm-python", serve) / "socket")


@pytest.fixture(scope="session")
def warm_python(warm_socket: str) -> list[str]:
    """Return the start of a command line that runs a program in a warm Python."""
    from gradparity.tests import warm_python

    return warm_python.command(warm_socket)


@pytest.fixture(scope="session")
def warm_ranks(warm_socket: str) -> list[str]:
    """Return the start of a command line for a program with ranks in warm Pythons."""
    from gradparity.tests import warm_python

    return warm_python.command(warm_socket, ranks=True)


@pytest.fixture
def scripts(tmp_path: Path, warm_python: list[str]) -> "Scripts":
    """Return a runner of standalone scripts, each in a new Python."""
    from gradparity.tests.scripts import Scripts

    return Scripts(tmp_path, warm_python)


@pytest.fixture(scope="session")
def runner() -> Iterator["Runner"]:
    """Return a runner with warm ranks; modules with other settings have their own."""
    from gradparity.tests.remembering import Remembering

    with Remembering(folder=".", timeout_s=60) as made:
        yield made


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the scaler's tests on a GPU as well, if the machine has one."""
    if visible_gpus():
        from gradparity.tests.on_gpu import on_both

        on_both(metafunc)


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    """Device type on which the ranks of a module compute."""
    kind: str = getattr(request, "param", "cpu")
    return kind


@pytest.fixture(scope="module")
def two(device: str) -> Iterator[Cluster]:
    """Cluster of two ranks for the tests of one module."""
    with _ranks(2, device) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four(device: str) -> Iterator[Cluster]:
    """Cluster of four ranks for the tests of one module."""
    with _ranks(4, device) as cluster:
        yield cluster


def _ranks(world_size: int, device: str) -> Cluster:
    if device == "cpu":
        return Cluster(world_size)
    from gradparity.tests.on_gpu import OnGpu

    return OnGpu(world_size)


@pytest.fixture
def counted_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock of a hunt by one that moves by a second when it is read.

    Each scenario reads the clock once. So a budget is a number of draws and of attempts
    to shrink, and does not depend on the load of the machine.
    """
    module = importlib.import_module("gradparity.conformance.run.hunt")
    clock = SimpleNamespace(monotonic=map(float, itertools.count()).__next__)
    monkeypatch.setattr(module, "time", clock)


@pytest.fixture(scope="session")
def in_namespaces() -> tuple[str, ...]:
    """Return the start of a command line that runs Python as root of new namespaces."""
    spaces = ("--user", "--map-root-user", "--net", "--pid", "--mount-proc")
    alone = ("unshare", *spaces, "--fork", "--kill-child")
    can = subprocess.run([*alone, "true"], capture_output=True, text=True)
    if can.returncode:
        pytest.skip(f"no namespaces can be made here: {can.stderr.strip()}")
    return (*alone, sys.executable)


@pytest.fixture(scope="session")
def on_two_hosts(in_namespaces: tuple[str, ...]) -> tuple[str, ...]:
    """Return the start of a command line for hosts.py."""
    return (*in_namespaces, str(Path(__file__).with_name("hosts.py")))


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Return ``once(name, make)``, which returns a folder filled by ``make(folder)``.

    Only the first worker that calls it for a name calls ``make``.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder in the session's
        shared = shared.parent

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def site(once: Once) -> Path:
    """Folder into which the wheel of this tree is installed."""
    return once("wheel", _install) / "site"


def _install(folder: Path) -> None:
    tree = Path(gradparity.__file__).parent
    made = (".*", "build", "*.egg-info", "__pycache__", "parity-*")
    shutil.copytree(
        tree, folder / "gradparity", ignore=shutil.ignore_patterns(*made, "results")
    )
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    quiet = ["--no-deps", "--no-build-isolation", "--no-index"]
    wheel = [*pip, "wheel", *quiet, "-w", ".", "./gradparity"]
    install = [*pip, "install", *quiet, "--target", "site"]
    _call(wheel, folder)
    _call([*install, *(path.name for path in folder.glob("*.whl"))], folder)


def _call(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def real_report(once: Once, warm_ranks: list[str]) -> Path:
    """Report of a run in which our scaler passes and torch's fails under tp.

    The page of the report is in the same folder.
    """
    return once("real-report", partial(_run, warm_ranks)) / "report.jsonl"


def _run(python: list[str], folder: Path) -> None:
    command = [*python, "-m", "gradparity.conformance", "run", "--quiet"]
    command += [f"--scaler={spec}" for spec in TESTED]
    command += [f"--scenario={each}" for each in SCENARIOS]
    done = subprocess.run(
        [*command, "--out", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr  # violations, and no broken harness


@pytest.fixture(scope="session")
def real(real_report: Path) -> Report:
    """Contents of ``real_report``."""
    return read_report(real_report)
