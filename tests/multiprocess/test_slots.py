"""Processes share slots; a process that dies gives its slots back."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gradparity.multiprocess import Cluster, HarnessError, WorldSpec
from gradparity.multiprocess.parent import slots
from gradparity.multiprocess.parent.slots import (
    SLOTS_VARIABLE,
    SlotPool,
    cpu_slots,
    gpu_slots,
    visible_gpus,
)
from gradparity.multiprocess.pytest_plugin.runner import Runner
from gradparity.multiprocess.spec import CallOptions

HOLDER = """
import sys, time
from pathlib import Path
from gradparity.multiprocess.parent.slots import SlotPool
with SlotPool(names=sys.argv[2].split(","), folder=Path(sys.argv[1])).hold(2) as held:
    print(*held, flush=True)
    time.sleep(1000)
"""


def pool(folder: Path, count: int = 3) -> SlotPool:
    return SlotPool(names=[f"cpu{i}" for i in range(count)], folder=folder)


def test_two_worlds_never_hold_the_same_slot(tmp_path: Path) -> None:
    shared = pool(tmp_path, 4)
    with shared.hold(2) as first, shared.hold(2) as second:
        assert len({*first, *second}) == 4


def test_a_large_world_takes_all_and_runs_alone(tmp_path: Path) -> None:
    shared = pool(tmp_path)
    with shared.hold(64) as held:
        assert len(held) == 3
        with pytest.raises(HarnessError, match="other runs hold them"):
            with shared.hold(1, limit_s=0.1):
                pass
    with shared.hold(3) as held:
        assert len(held) == 3


def test_slots_of_a_killed_process_are_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "cpu0,cpu1,cpu2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().split() == ["cpu0", "cpu1"]
        with pool(tmp_path).hold(1) as held:
            assert held == ("cpu2",)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    with pool(tmp_path).hold(3, limit_s=20) as held:
        assert len(held) == 3


def test_worlds_that_need_more_than_half_do_not_block_each_other(
    tmp_path: Path,
) -> None:
    shared = pool(tmp_path)
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(5):
            with shared.hold(2, limit_s=60):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.002)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 20
    assert max(most) == 1


def test_hosts_with_one_home_do_not_share_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(SLOTS_VARIABLE, "2")
    monkeypatch.setattr(socket, "gethostname", lambda: "one")
    with cpu_slots().hold(2):
        monkeypatch.setattr(socket, "gethostname", lambda: "two")
        with cpu_slots().hold(2, limit_s=0.1) as held:
            assert held == ("cpu0", "cpu1")


def test_a_timeout_for_slots_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(SLOTS_VARIABLE, "1")
    monkeypatch.setattr(socket, "gethostname", lambda: "one")
    for shared, way_out in (
        (cpu_slots(), f"{SLOTS_VARIABLE}=0"),
        (gpu_slots(["7"]), "CUDA_VISIBLE_DEVICES"),
    ):
        with shared.hold(1), pytest.raises(HarnessError) as caught:
            with shared.hold(1, limit_s=0.1):
                pass
        assert f"fuser -v {tmp_path}/gradparity/slots/one/*.lock" in str(caught.value)
        assert str(caught.value).endswith(f"{way_out}.")


def test_a_world_that_a_rank_starts_runs_on_the_slots_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # regression: M10, a session inside of a world waited for the slots of that world
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(SLOTS_VARIABLE, "1")

    def nested() -> tuple[str, ...]:
        with cpu_slots().hold(2, 0.1) as cpu, gpu_slots(["3"]).hold(1, 0.1) as gpu:
            return *cpu, *gpu

    with cpu_slots().hold(1), gpu_slots(["3"]).hold(1), Cluster(1) as cluster:
        assert cluster.run(nested) == [("cpu0", "3")]


def test_zero_cpu_slots_hold_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SLOTS_VARIABLE, "0")
    with cpu_slots().hold(8) as held:
        assert held == ()


@pytest.mark.parametrize("count", ["abc", "-1", ""])
def test_a_wrong_number_of_cpu_slots_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    monkeypatch.setenv(SLOTS_VARIABLE, count)
    with pytest.raises(HarnessError, match=f"{SLOTS_VARIABLE} must be a .* '{count}'$"):
        cpu_slots()


def test_without_lock_files_cpu_slots_are_optional_and_gpu_slots_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_folder = tmp_path / "file"
    no_folder.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_folder))
    with cpu_slots().hold(2) as held:
        assert held == ()
    with pytest.raises(HarnessError, match="XDG_CACHE_HOME"):
        with gpu_slots(["0"]).hold(1):
            pass


def test_gpu_slots_are_named_as_in_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 3")
    assert visible_gpus(8) == ["5", "3"]
    with gpu_slots(["5", "3"]).hold(1) as held:
        assert held == ("5",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus(8) == []


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("1,8,0", ["1"]),
        ("NoDevFiles", []),
        ("0,0", []),
        ("GPU-7a,GPU-3b", ["GPU-7a", "GPU-3b"]),
        ("GPU-7a,,1", ["GPU-7a"]),
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(
    monkeypatch: pytest.MonkeyPatch, listed: str, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_gpus(8) == names


def test_a_world_sees_the_gpus_of_its_slots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def submit(self: Cluster, *_: object) -> tuple[()]:
        seen.append(self.spec.visible_devices)
        return ()

    seen: list[tuple[str, ...]] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7a")
    monkeypatch.setattr(slots, "_installed_gpus", lambda: 8)
    monkeypatch.setattr(Cluster, "submit", submit)
    spec = WorldSpec(world_size=2, backend="nccl")
    options = CallOptions(timeout_s=1.0)
    runner = Runner(None, live=False, report=print)
    runner.run(spec, options, int)
    assert seen == [("5", "GPU-7a")]
    # regression: M18, a cluster for each tuple of devices
    one = replace(spec, world_size=1)
    with gpu_slots(["5"]).hold(1):
        runner.run(one, options, int)
    runner.run(replace(one, timeout_s=7.0), options, int)
    assert seen[1:] == [("GPU-7a",)] * 2
    with gpu_slots(["GPU-7a"]).hold(1):
        runner.run(one, options, int)
    assert seen[3:] == [("5",)]
    runner.run(replace(one, visible_devices=("6",)), options, int)
    assert seen[4:] == [("6",)]
