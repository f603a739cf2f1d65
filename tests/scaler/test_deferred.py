"""Where reading a result synchronises, the host reads it later: forced on a CPU."""

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler, PeerFailedError, RanksDisagreeError
from gradparity.scaler.sync import OverflowSync
from gradparity.tests.agreeing import give_gradient, parameter, sgd
from gradparity.tests.stepping import FUSED, INF, scaled


def deferred() -> None:
    """Take the path of an accelerator, on this rank."""
    OverflowSync._is_deferred = staticmethod(lambda device: True)  # type: ignore[method-assign]


def restored() -> None:
    OverflowSync._is_deferred = staticmethod(  # type: ignore[method-assign]
        lambda device: device.type != "cpu"
    )


@FUSED
def test_f04_no_rank_steps_when_one_has_raised(two: Cluster, fused: bool) -> None:
    def run() -> tuple[list[float], str, str]:
        deferred()
        try:
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
        finally:
            restored()

    (kept, raised, _), (also_kept, first, second) = two.run(run)
    assert kept == also_kept == [1.0, 1.0]
    assert raised == "ValueError"
    assert "PeerFailedError" in (first, second)


@FUSED
@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_overflow_anywhere_skips_everywhere(
    two: Cluster, fused: bool, bad_rank: int | None
) -> None:
    def run() -> tuple[list[float], float]:
        deferred()
        try:
            p, scaler = parameter(torch.ones(2)), scaled(GradScaler)
            give_gradient(p, INF if dist.get_rank() == bad_rank else 4.0)
            scaler.step(sgd([p], fused))
            scaler.update()
            held: list[float] = p.detach().tolist()
            return held, scaler.get_scale()
        finally:
            restored()

    expected = ([0.75, 0.75], 4.0) if bad_rank is None else ([1.0, 1.0], 2.0)
    assert two.run(run) == [expected] * 2


def test_ranks_that_disagree_raise_at_the_next_sync(two: Cluster) -> None:
    def run() -> str:
        deferred()
        try:
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
        finally:
            restored()

    assert two.run(run) == ["growth_interval"] * 2


@FUSED
@pytest.mark.parametrize("chosen", [None, 4.0])
def test_an_optimizer_that_raised_on_one_rank_is_heard_of_later(
    two: Cluster, fused: bool, chosen: float | None
) -> None:
    def run() -> list[str]:
        deferred()
        try:
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
        finally:
            restored()

    first, second = two.run(run)
    assert first == second
    assert first[:2] == ["", ""]
    assert all("failures" in each for each in first[3:])
