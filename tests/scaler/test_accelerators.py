"""Late reads of results on an accelerator, forced on a CPU."""

import logging
import warnings
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from gradparity.multiprocess import Cluster
from gradparity.scaler import (
    GradScaler,
    PeerFailedError,
    RanksDisagreeError,
    sync,
)
from gradparity.scaler.grads import moved_to
from gradparity.tests.agreeing import give_gradient, parameter, sgd
from gradparity.tests.stepping import (
    FUSED,
    INF,
    Kernels,
    device_type,
    exchanged,
    scaled,
)


@FUSED
def test_no_rank_steps_when_one_has_raised(two: Cluster, fused: bool) -> None:
    def run() -> tuple[list[float], str, str]:
        with exchanged("settled"):
            p, scaler = parameter(torch.ones(2)), scaled(GradScaler)
            optimizer = sgd([p], fused)
            give_gradient(p, 4.0)

            def unreadable(*_: Any) -> Any:
                raise ValueError("cannot be read")

            first = second = "none"
            if dist.get_rank() == 0:
                scaler._unscale_grads_ = unreadable
            try:
                scaler.step(optimizer)
            except (ValueError, PeerFailedError) as error:
                first = type(error).__name__
            # The host hears of it at its next sync at the latest, which every rank
            # takes part in: whoever goes on alone would wait.
            try:
                scaler.update()
            except PeerFailedError as error:
                second = type(error).__name__
            held: list[float] = p.detach().tolist()
            return held, first, second

    (kept, raised, _), (also_kept, first, second) = two.run(run)
    assert kept == also_kept == [1.0, 1.0]
    assert raised == "ValueError"
    assert "PeerFailedError" in (first, second)


def test_the_host_waits_for_the_rows_on_their_own_device() -> None:
    result = mock.Mock()
    with mock.patch.object(sync, "torch") as fake:
        fake.cuda.is_current_stream_capturing.return_value = False
        sync._on_its_way(result)
    fake.cuda.current_stream.assert_called_once_with(result.rows.device)
    fake.cuda.Event().record.assert_called_once_with(fake.cuda.current_stream())


@FUSED
@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_overflow_anywhere_skips_everywhere(
    two: Cluster, fused: bool, bad_rank: int | None
) -> None:
    def run() -> tuple[list[float], float]:
        with exchanged("settled"):
            p, scaler = parameter(torch.ones(2)), scaled(GradScaler)
            give_gradient(p, INF if dist.get_rank() == bad_rank else 4.0)
            scaler.step(sgd([p], fused))
            scaler.update()
            held: list[float] = p.detach().tolist()
            return held, scaler.get_scale()

    expected = ([0.75, 0.75], 4.0) if bad_rank is None else ([1.0, 1.0], 2.0)
    assert two.run(run) == [expected] * 2


def test_ranks_that_disagree_raise_at_the_next_sync(two: Cluster) -> None:
    def run() -> str:
        with exchanged("settled"):
            p, scaler = parameter(torch.ones(2)), scaled(GradScaler)
            optimizer = sgd([p], fused=True)
            scaler.set_growth_interval(10 + dist.get_rank())
            try:
                for _ in range(2):
                    give_gradient(p, 4.0)
                    scaler.step(optimizer)
                    scaler.update()
            except RanksDisagreeError as error:
                return ", ".join(error.lowest)
            return "none"

    assert two.run(run) == ["growth_interval"] * 2


@FUSED
@pytest.mark.parametrize("chosen", [None, 4.0])
def test_an_optimizer_that_raised_on_one_rank_is_heard_of_later(
    two: Cluster, fused: bool, chosen: float | None
) -> None:
    def run() -> list[str]:
        with exchanged("settled"):
            p, scaler, seen = parameter(torch.ones(2)), scaled(GradScaler), []
            optimizer = sgd([p], fused)

            def planted(*_: Any) -> None:
                handle.remove()
                raise LookupError

            for iteration in range(6):
                if (iteration, dist.get_rank()) == (1, 1):
                    handle = optimizer.register_step_pre_hook(planted)
                give_gradient(p, 4.0)
                try:
                    with suppress(LookupError):
                        scaler.step(optimizer)
                    scaler.update(chosen)
                    seen.append("")
                except RanksDisagreeError as error:
                    seen.append(", ".join(error.lowest))
            return seen

    first, second = two.run(run)
    assert first == second
    assert first[:2] == ["", ""]
    assert all("missed" in each for each in first[3:])


# regression: S1
@FUSED
@pytest.mark.parametrize("how", ["cpu", "settling", "settled"])
@pytest.mark.parametrize("lacks", ["a scale", "gradients"])
def test_a_step_without_a_scale_or_gradients_raises_on_all_ranks(
    two: Cluster, fused: bool, how: str, lacks: str
) -> None:
    def run() -> str:
        with exchanged(how):
            p = parameter(torch.ones(2))
            scaler: Any = GradScaler(device_type(), init_scale=4.0, growth_interval=1)
            if lacks == "gradients":
                scaler.scale(torch.ones(()))
            optimizer = sgd([p], fused)
            for _ in range(2):
                if lacks == "a scale":
                    give_gradient(p, 4.0)
                try:
                    scaler.step(optimizer)
                    scaler.update()
                except AssertionError as error:
                    return str(error)
        return "nothing"

    wanted = "_scale is None" if lacks == "a scale" else "No inf checks"
    assert all(wanted in message for message in two.run(run))


@pytest.mark.parametrize("how", ["cpu", "settling", "settled"])
def test_an_update_without_a_step_raises_once(two: Cluster, how: str) -> None:
    """Only ``update`` raises, and not the next sync, which reads the update's row."""

    def run() -> list[str]:
        seen = []
        with exchanged(how):
            p, scaler = parameter(torch.ones(2)), scaled(GradScaler)
            optimizer = sgd([p], fused=True)
            for steps in (True, False, True, True):
                give_gradient(p, 4.0)
                try:
                    if steps:
                        scaler.step(optimizer)
                    scaler.update()
                    seen.append("")
                except AssertionError as error:
                    seen.append(str(error))
        return seen

    for seen in two.run(run):
        assert seen == ["", "No inf checks were recorded prior to update.", "", ""]


# regression: S5
@FUSED
@pytest.mark.parametrize("how", ["cpu", "settling", "settled"])
@pytest.mark.parametrize("clips", [False, True])
def test_all_ranks_know_of_an_overflow_and_log_it(
    two: Cluster, device: str, fused: bool, how: str, clips: bool
) -> None:
    def run() -> tuple[Any, int]:
        lines: list[str] = []
        log = logging.getLogger("gradparity.scaler")
        handler, level = logging.Handler(), log.level
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            with exchanged(how):
                p, scaler = parameter(torch.ones(2)), scaled(GradScaler)
                optimizer = sgd([p], fused)
                for iteration in range(2):
                    is_bad = iteration == 0 and dist.get_rank() == 1
                    give_gradient(p, INF if is_bad else 4.0)
                    if clips:
                        scaler.clip_and_step(optimizer, 1e9)
                    else:
                        scaler.step(optimizer)
                    scaler.update()
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
        return scaler.last_overflow, len(lines)

    for rank, (overflow, lines) in enumerate(two.run(run)):
        assert overflow.rank == 1 and lines == 1
        # A fused step on an accelerator reads no gradient on the host.
        reads = how == device == "cpu"
        is_seen = reads or (not fused and rank == 1)
        assert overflow.parameter == (0 if is_seen else None)
        assert overflow.kind == ("inf" if reads else "inf or nan")
        where = " in parameter 0" if is_seen else ""
        assert str(overflow) == f"{overflow.kind}{where} on rank 1"


def test_one_process_on_an_accelerator_knows_its_overflow() -> None:
    with exchanged("settled"):
        p, scaler = parameter(torch.ones(2)), scaled(GradScaler)
        give_gradient(p, INF)
        scaler.step(sgd([p]))
        scaler.update()
    assert scaler.last_overflow == (0, 0, None, "inf or nan")


# regression: T2
@pytest.mark.parametrize("how", ["settling", "settled"])
def test_replicas_beside_own_parameters_on_an_accelerator(
    two: Cluster, how: str
) -> None:
    """Early clips identify replicas at once; a late clip is wrong once, and warns."""

    def run() -> tuple[list[float], int]:
        shared, own = (parameter(torch.zeros(1)) for _ in range(2))
        optimizer, norms = sgd([shared, own]), []
        with exchanged(how), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            scaler = scaled(GradScaler)
            for _ in range(4):
                give_gradient(shared, 12.0)
                give_gradient(own, 16.0 * (1 + dist.get_rank()))
                norms.append(float(scaler.clip_and_step(optimizer, 1e9)))
                scaler.update()
        return norms, len([w for w in warned if "more than once" in str(w.message)])

    right = pytest.approx((3.0**2 + 4.0**2 + 8.0**2) ** 0.5)
    for norms, warned in two.run(run):
        late = int(how == "settled")
        assert [norm == right for norm in norms] == [not late, True, True, True]
        assert warned == late


# regression: S13
def test_a_copy_to_the_host_is_waited_for() -> None:
    """The CPU reads pinned memory at once, so the copy must not be asynchronous."""
    with FakeTensorMode(), Kernels() as to_host:
        moved_to(torch.ones((), device="cuda"), torch.device("cpu"))
    with Kernels() as from_host:
        moved_to(torch.ones(()), torch.device("meta"))
    copies = [*to_host.called, *from_host.called]
    assert [waits for name, waits in copies if "copy" in name] == [False, True]


# regression: S14
@pytest.mark.parametrize("how", ["settling", "settled"])
def test_nothing_is_read_while_a_graph_is_captured(two: Cluster, how: str) -> None:
    """Rows from before the graph and from within are read at the next sync after it."""

    def run() -> list[Any]:
        seen = []
        with exchanged(how):
            p, scaler = parameter(torch.ones(2)), scaled(GradScaler)
            optimizer = sgd([p], fused=True)
            for captures, value in ((False, 4.0), (True, INF), (False, 4.0)):
                give_gradient(p, value if dist.get_rank() else 4.0)
                with mock.patch.object(sync, "_is_captured", return_value=captures):
                    scaler.step(optimizer)
                    seen.append(scaler.last_overflow)
                    scaler.update()
        return [*seen, scaler.get_scale()]

    for before, captured, after, scale in two.run(run):
        assert before is None and captured is None
        assert after is not None and after.rank == 1
        assert scale == 2.0
