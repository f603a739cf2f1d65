"""A forkserver that does not work says why, and never keeps its parent waiting."""

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradparity.multiprocess import Cluster, ForkserverError, WorldError
from gradparity.multiprocess.linux import has_ended
from gradparity.multiprocess.parent import forkserver_client

LOUD = "import os, sys; os.write(2, b'x' * (1 << 20)); sys.stderr.write('y' * 1000)"
SLEEPER = """
import time
def sleeps():
    time.sleep(1000)
sleeps()
"""
ASKS = "import os; asked = os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')"
DIES = "import os; os.write(2, b'no such luck'); os._exit(7)"


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Use a new forkserver in this test, and end it; other tests keep theirs."""
    monkeypatch.setattr(forkserver_client, "_client", None)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    forkserver_client.stop_forkserver()


def wait_for_end(pid: int) -> None:
    """Wait for the end of a process that its parent has not waited for yet."""
    pidfd = os.pidfd_open(pid)
    while not has_ended(pidfd):
        time.sleep(0.01)
    os.close(pidfd)


@pytest.mark.usefixtures("own_server")
@pytest.mark.slow
def test_a_preloaded_module_may_print_much(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    with Cluster(1, preload=("loud",)) as cluster:
        assert cluster.run(lambda: "loud" in sys.modules) == [True]


def test_a_rank_is_replaced_whose_end_the_server_has_not_reported_yet() -> None:
    with Cluster(2) as cluster:
        cluster.start()
        server, lost = forkserver_client.forkserver().pid, cluster.pids[1]
        os.kill(server, signal.SIGSTOP)
        os.kill(lost, signal.SIGKILL)
        wait_for_end(lost)  # not at once: it has threads
        later = threading.Timer(1.0, os.kill, (server, signal.SIGCONT))
        later.start()
        assert lost not in cluster.run(os.getpid)
        later.join()


@pytest.mark.usefixtures("own_server")
@pytest.mark.slow
def test_an_import_that_never_ends_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    with Cluster(1) as cluster:  # torch has been imported
        cluster.run(lambda: 1)
    late = Cluster(1, preload=("sleeper",), start_timeout_s=0.5)
    before = forkserver_client.forkserver().pid
    with pytest.raises(ForkserverError) as caught:
        late.start()
    text = str(caught.value)
    assert "no answer for 0.5 s while importing sleeper" in text
    assert "start_timeout_s" in text
    assert f'{tmp_path}/sleeper.py", line 4 in sleeps' in text
    with Cluster(1) as cluster:
        assert cluster.run(lambda: 1) == [1]
    assert forkserver_client.forkserver().pid != before


def test_a_failed_import_is_reported_each_time_and_affects_no_other_rank() -> None:
    absent = Cluster(1, preload=("no_such_module",))
    for _ in range(2):
        with pytest.raises(ForkserverError, match="cannot preload no_such_module"):
            absent.start()
    with Cluster(1) as cluster:
        assert cluster.run(lambda: 1) == [1]


@pytest.mark.usefixtures("own_server")
@pytest.mark.parametrize(
    "parent_is_slow", [pytest.param(False, marks=pytest.mark.slow), True]
)
@pytest.mark.slow
def test_the_stderr_of_a_server_that_ends_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent_is_slow: bool
) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    monkeypatch.setattr(forkserver_client, "PRELOAD", ())  # torch: it dies first
    preload = forkserver_client.ForkserverClient.preload

    def preload_until_it_ends(*given: Any) -> None:
        preload(*given)
        wait_for_end(given[0].pid)

    if parent_is_slow:
        monkeypatch.setattr(
            forkserver_client.ForkserverClient, "preload", preload_until_it_ends
        )
    with pytest.raises(ForkserverError, match="code 7\nno such luck"):
        Cluster(1, preload=("dies",)).start()


@pytest.mark.usefixtures("own_server")
def test_a_server_that_cannot_start_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_: object, **__: object) -> None:
        raise OSError("no process left")

    monkeypatch.setattr(forkserver_client, "_started", start)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no process left"):
        forkserver_client.ForkserverClient()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.usefixtures("own_server")
@pytest.mark.parametrize("name", ["random.py", "torch/__init__.py"])
def test_a_file_that_hides_a_module_is_named(tmp_path: Path, name: str) -> None:
    hiding = tmp_path / name
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("raise RuntimeError('mine')")
    with pytest.raises(ForkserverError) as caught:
        Cluster(1).start()
    assert f'File "{hiding}", line 1' in str(caught.value)


@pytest.mark.usefixtures("own_server")
def test_ranks_have_the_options_of_the_parents_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "warnoptions", ["error:look here:UserWarning"])

    def look() -> list[str]:
        warnings.warn("another one", stacklevel=1)
        return list(sys.warnoptions)

    with Cluster(1) as cluster:
        assert cluster.run(look) == [sys.warnoptions]
        with pytest.raises(WorldError, match="raised UserWarning: look here"):
            cluster.run(lambda: warnings.warn("look here", stacklevel=1))


def test_a_question_for_gpus_loads_no_driver_before_a_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # regression: M17
    (tmp_path / "asks.py").write_text(ASKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)

    def look() -> tuple[str | None, str | None]:
        import asks  # type: ignore[import-not-found]  # made above

        return asks.asked, os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")

    with Cluster(1, preload=("asks",)) as cluster:
        assert cluster.run(look) == [("1", None)]
