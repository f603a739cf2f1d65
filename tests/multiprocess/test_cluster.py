"""Behaviour of a cluster in which no call fails."""

import gc
import io
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from gradparity.multiprocess import (
    Cluster,
    NotPicklableError,
    WorldError,
    WorldSpec,
    current_world,
)
from gradparity.multiprocess.rank.worker import _RANK_TIMEOUT
from gradparity.multiprocess.report import render_output
from gradparity.multiprocess.spec import CallOptions


@pytest.fixture(scope="module")
def cluster() -> Any:
    with Cluster(2) as made:
        yield made


@dataclass
class Point:
    x: int


def ranks_sum(offset: int) -> Any:
    value = torch.ones(1) * current_world().rank
    dist.all_reduce(value)
    return value.item() + offset


def test_calls_the_function_on_every_rank(cluster: Cluster) -> None:
    assert cluster.run(ranks_sum, 10) == [11.0, 11.0]
    assert cluster.run(ranks_sum, offset=1) == [2.0, 2.0]


def test_a_lambda_and_a_closure_travel(cluster: Cluster) -> None:
    here = 5
    assert cluster.run(lambda: current_world().rank + here) == [5, 6]


def test_a_class_of_the_test_module_comes_back_as_itself(cluster: Cluster) -> None:
    assert cluster.run(lambda p: Point(p.x + 1), Point(1)) == [Point(2), Point(2)]


def test_tensors_travel_both_ways(cluster: Cluster) -> None:
    sent = torch.arange(6.0).reshape(2, 3)
    for result in cluster.run(lambda t: t * 2, sent):
        assert torch.equal(result, sent * 2)


def test_a_world_has_rank_size_backend_and_device(cluster: Cluster) -> None:
    def look() -> Any:
        world = current_world()
        return world.rank, world.world_size, world.backend, str(world.device)

    assert cluster.run(look) == [(0, 2, "gloo", "cpu"), (1, 2, "gloo", "cpu")]


def test_each_type_of_device_may_have_a_backend_of_its_own() -> None:
    backend = "cpu:gloo,cuda:gloo"

    def look() -> Any:
        world = current_world()
        return world.backend, world.device.type, ranks_sum(0)

    with Cluster(2, backend=backend) as cluster:
        assert cluster.run(look) == [(backend, "cpu", 1.0)] * 2


def test_a_device_that_is_not_there_is_named_when_the_ranks_start() -> None:
    with Cluster(1) as cluster:
        has_xpu = cluster.run(lambda: torch.xpu.is_available())[0]
    if has_xpu:
        pytest.skip("this machine has one")
    with pytest.raises(WorldError, match="rank 0 has no XPU device: none is visible"):
        Cluster(1, backend="xccl").start()


OPTIONS = """
import torch.distributed as dist

made, taken = [], []
init = dist.init_process_group

def options():
    made.append(object())
    return made[-1]

def recording(*args, pg_options, **settings):
    taken.append(pg_options)
    init(*args, **settings)

dist.init_process_group = recording
"""


def test_a_process_group_takes_options_made_on_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "makes_options.py").write_text(OPTIONS)
    monkeypatch.syspath_prepend(tmp_path)

    def look() -> Any:
        import makes_options  # type: ignore[import-not-found]  # made above

        # the first group was made while that module was imported
        return len(makes_options.made), makes_options.taken == makes_options.made[1:]

    with Cluster(2, pg_options="makes_options:options") as cluster:
        assert cluster.run(look) == [(1, True)] * 2
        fresh = cluster.with_options(isolation="group")
        assert fresh.run(look) == [(2, True)] * 2


def test_there_is_no_world_in_the_parent() -> None:
    with pytest.raises(RuntimeError, match=r"Cluster\.run"):
        current_world()


def test_a_mesh_is_made_once(cluster: Cluster) -> None:
    def mesh_is_cached() -> Any:
        world = current_world()
        mesh = world.mesh((2,), ("data",))
        return mesh is world.mesh((2,), ("data",)), mesh.mesh_dim_names

    assert cluster.run(mesh_is_cached) == [(True, ("data",))] * 2
    assert (
        cluster.with_options(isolation="group").run(mesh_is_cached)
        == [(True, ("data",))] * 2
    )


def test_the_store_is_empty_in_each_call(cluster: Cluster) -> None:
    def use_store() -> Any:
        world = current_world()
        before = world.store.check(["key"])
        dist.barrier()
        world.store.set("key", str(world.rank))
        return before

    assert cluster.run(use_store) == [False, False]
    assert cluster.run(use_store) == [False, False]


def test_only_the_limit_of_the_call_limits_waits_for_the_store(
    cluster: Cluster,
) -> None:
    def limit() -> Any:
        store: Any = current_world().store  # its stub lacks this
        return store.timeout

    assert cluster.run(limit) == [_RANK_TIMEOUT] * 2


def test_generators_are_seeded_alike_in_each_call(cluster: Cluster) -> None:
    def draw() -> Any:
        return random.random(), torch.rand(1).item()

    first, second = cluster.run(draw), cluster.run(draw)
    assert first == second
    assert first[0] == first[1]


def test_pool_keeps_processes_and_group(cluster: Cluster) -> None:
    before = cluster.pids
    cluster.run(ranks_sum, 0)
    assert cluster.pids == before
    assert cluster.run(os.getpid) == list(before)


def test_group_makes_a_fresh_process_group(cluster: Cluster) -> None:
    def group_id() -> Any:
        return id(dist.group.WORLD), os.getpid()

    kept = cluster.run(group_id)
    assert cluster.run(group_id) == kept
    fresh = cluster.with_options(isolation="group").run(group_id)
    assert [pid for _, pid in fresh] == [pid for _, pid in kept]
    assert cluster.with_options(isolation="group").run(ranks_sum, 0) == [1.0, 1.0]


def test_a_default_group_that_a_call_makes_has_meshes_of_its_own(
    cluster: Cluster,
) -> None:
    def reduce() -> float:
        value = torch.ones(1)
        mesh = current_world().mesh((2, 1), ("a", "b"))
        dist.all_reduce(value, group=mesh.get_group("a"))
        dist.all_reduce(value, group=mesh.get_group("b"))
        return value.item()

    def reduce_in_another_group() -> float:
        world = current_world()
        dist.destroy_process_group()
        store = dist.PrefixStore("another", world.store)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=2)
        return reduce()

    assert cluster.run(reduce) == [2.0, 2.0]
    assert cluster.run(reduce_in_another_group) == [2.0, 2.0]


def test_no_mesh_of_an_earlier_group_is_used_again(cluster: Cluster) -> None:
    def mesh_of_result() -> Any:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        placed = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Shard(0)])
        result: Any = placed * 2  # torch caches what it is, by meshes that are equal
        return result.device_mesh is mesh

    for _ in range(2):
        assert cluster.with_options(isolation="group").run(mesh_of_result) == [
            True,
            True,
        ]


def test_process_takes_fresh_ranks(cluster: Cluster) -> None:
    pids = cluster.with_options(isolation="process").run(os.getpid)
    assert not set(pids) & set(cluster.pids)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the kernel's, on Linux")
def test_threads_of_a_rank_do_not_preempt_one_another(cluster: Cluster) -> None:
    def policies() -> set[int]:
        ranks_sum(0)
        threads = map(int, os.listdir("/proc/self/task"))  # gloo's among them
        return {os.sched_getscheduler(thread) for thread in threads}

    assert cluster.run(policies) == [{os.SCHED_BATCH}] * 2


def test_a_group_that_a_package_keeps_is_never_a_stale_one(cluster: Cluster) -> None:
    def sum_over_kept() -> Any:
        made = types.ModuleType("a_package")
        package: Any = sys.modules.setdefault("a_package", made)
        if not hasattr(package, "group"):
            package.group = dist.new_group()
        for _ in range(20):
            dist.new_group()
        total = torch.ones(())
        dist.all_reduce(total, group=package.group)
        dist.get_global_rank(package.group, 1)  # raises for a group that is gone
        return total.item()

    before = cluster.pids
    for _ in range(4):
        assert cluster.run(sum_over_kept) == [2.0, 2.0]
    assert cluster.pids != before  # or no call had met too many groups


def test_a_destroyed_group_is_recreated(cluster: Cluster) -> None:
    cluster.run(dist.destroy_process_group)
    assert cluster.run(ranks_sum, 0) == [1.0, 1.0]


# Of the module, as those below: backends do not travel inside of a closure.
def change_backends() -> None:
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    if not torch.backends.flags_frozen():  # by torch.testing, if the parent has it
        cudnn.benchmark = cudnn.deterministic = True
        cudnn.enabled = False
    for enable in (
        cuda.enable_flash_sdp,
        cuda.enable_mem_efficient_sdp,
        cuda.enable_math_sdp,
        cuda.enable_cudnn_sdp,
    ):
        enable(False)


def backend_settings() -> list[bool]:
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    return [
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.enabled,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    ]


def multiply_in_tf32() -> None:
    # torch's getter for all kinds of products raises from here on
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def precisions() -> tuple[str, str]:
    of_matmul = torch.backends.cuda.matmul.fp32_precision
    return torch.get_float32_matmul_precision(), of_matmul


def multiply_all_in_tf32() -> None:
    torch.set_float32_matmul_precision("high")


@pytest.mark.parametrize("spoil", [multiply_in_tf32, multiply_all_in_tf32])
def test_settings_are_put_back_where_some_are_frozen(
    spoil: Callable[[], None],
) -> None:
    with Cluster(1) as ranks:
        ranks.run(torch.backends.disable_global_flags)  # as torch.testing does
        clean = ranks.run(precisions)
        ranks.run(spoil)
        ((of_all, of_matmul),) = ranks.run(precisions)
    assert clean == [("highest", "none")]
    assert of_all == "highest" and of_matmul in ("none", "ieee")


def test_settings_do_not_leak_into_the_next_call(
    cluster: Cluster, tmp_path: Path
) -> None:
    def spoil(folder: Path) -> Any:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_flush_denormal(True)
        multiply_in_tf32()
        change_backends()
        sys.setrecursionlimit(5000)
        gc.disable()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.environ["SPOILT"] = "1"
        os.chdir(folder)
        sys.path.append("/spoilt")
        sys.stdout = None

    def look() -> Any:
        print("still here")
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.full((), 1e-40).mul(1.0).item(),
            backend_settings(),
            *precisions(),
            sys.getrecursionlimit(),
            gc.isenabled(),
            signal.getsignal(signal.SIGTERM),
            "SPOILT" in os.environ,
            os.getcwd(),
            "/spoilt" in sys.path,
        )

    clean = cluster.run(look)
    cluster.run(spoil, tmp_path)
    assert cluster.run(look) == clean
    assert clean[0][2] == 1


def test_ranks_follow_the_parents_folder_and_environment(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOLLOWED", "yes")
    found = cluster.run(lambda: (os.getcwd(), os.environ["FOLLOWED"]))
    assert found == [(str(tmp_path), "yes")] * 2


def test_ranks_do_not_see_the_parents_command_line(cluster: Cluster) -> None:
    assert cluster.run(lambda: sys.argv) == [["gradparity-rank"]] * 2


def test_output_is_kept_rank_by_rank(cluster: Cluster) -> None:
    def speak() -> Any:
        print("out", current_world().rank)
        os.write(2, b"err\n")

    outcomes = cluster.outcomes(speak)
    assert [o.output for o in outcomes] == ["out 0\nerr\n", "out 1\nerr\n"]


class Terminal(io.StringIO):
    """Stand-in for stdout that creates a file when a certain text is written."""

    def __init__(self, text: str, file: Path) -> None:
        super().__init__()
        self._text, self._file = text, file

    def write(self, text: str) -> int:
        if self._text in text:
            self._file.touch()
        return super().write(text)


def test_live_output_is_shown_while_the_ranks_run(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = tmp_path / "shown"

    def speak() -> None:
        print("ready\nand", end="")
        while not shown.exists():
            time.sleep(0.01)

    terminal = Terminal("rank 1: ready\n", shown)
    monkeypatch.setattr(sys, "stdout", terminal)
    live = CallOptions(timeout_s=60, live=True)
    outcomes = cluster.submit(live, speak)
    assert [o.output for o in outcomes] == ["ready\nand"] * 2
    shown_later = "--- rank {} ---\nready\nand\n"
    assert render_output(outcomes) == shown_later.format(0) + shown_later.format(1)
    cluster.run(print, "not live")
    lines = sorted(terminal.getvalue().splitlines())
    assert lines == [f"rank {r}: {text}" for r in (0, 1) for text in ("and", "ready")]


def test_a_call_that_cannot_be_pickled_is_refused_before_any_rank_runs(
    cluster: Cluster,
) -> None:
    lock = threading.Lock()
    before = cluster.pids
    with pytest.raises(NotPicklableError, match="cannot be sent"):
        cluster.run(lambda: lock)
    assert cluster.pids == before


def test_large_values_travel(cluster: Cluster) -> None:
    sent = torch.ones(3_000_000)
    assert cluster.run(lambda t: t, sent)[1].sum() == 3_000_000


def test_a_cluster_can_be_used_again_after_close() -> None:
    cluster = Cluster(1)
    assert cluster.pids == ()
    assert cluster.run(lambda: 1) == [1]
    cluster.close()
    assert cluster.pids == ()
    assert cluster.run(lambda: 2) == [2]
    cluster.close()


def test_calls_from_several_threads_wait_for_each_other(cluster: Cluster) -> None:
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(cluster.run(ranks_sum, 0)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1.0, 1.0]] * 4


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"world_size": 0}, ValueError),
        ({"world_size": "2"}, TypeError),
        ({"world_size": 2, "backend": "no such"}, ValueError),
        ({"world_size": 2, "backend": None}, TypeError),
        ({"world_size": 2, "pg_options": print}, TypeError),
        ({"world_size": 2, "isolation": "none"}, ValueError),
        ({"world_size": 2, "timeout_s": 0}, ValueError),
    ],
)
def test_a_wrong_spec_is_refused(
    settings: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        WorldSpec(**settings)


SCRIPT = """
import torch, torch.distributed as dist
from gradparity.multiprocess import Cluster, current_world
factor = 3
def total():
    value = torch.ones(1) * current_world().rank * factor
    dist.all_reduce(value)
    return value.item()
with Cluster(2) as cluster:
    print(cluster.run(total))
"""


@pytest.mark.parametrize(
    "how",
    [
        "script",
        pytest.param("stdin", marks=pytest.mark.slow),
        pytest.param("module", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_works_from_a_program_without_a_main_guard(how: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    command, given = {
        "script": (["program.py"], None),
        "stdin": (["-i", "-q"], SCRIPT.replace("with", "\nwith") + "\n"),
        "module": (["-m", "program"], None),
    }[how]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        input=given,
        capture_output=True,
        text=True,
    )
    assert "[3.0, 3.0]" in done.stdout, done.stderr
