"""Call histories: our scaler equals the oracle, and planted faults differ."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradparity.fixtures import faulty
from gradparity.tests.docs_blocks import ROOT, blocks
from gradparity.tests.scaler.histories import accelerated, planted
from gradparity.tests.scaler.histories.call_histories import (
    CallHistories,
    Ranks,
    Search,
)
from gradparity.tests.scaler.histories.history import (
    FAMILIES,
    History,
    histories,
    parse,
)
from gradparity.tests.scaler.histories.oracle import Track, tracks_of
from gradparity.tests.scaler.histories.planted import PLANTED
from gradparity.tests.scaler.histories.replica import norm_of

TORCH, PLAIN = "torch.amp:GradScaler", f"{faulty.__name__}:PlainScaler"
FOLLOWED = [
    # what a rank has begun ends with its own update where it trains alone
    "@2/back:2,step,elder,update",
    # divided with the other optimizer's, and never stepped with
    "shared@2/back:2,inf:1,clip:1,update,clip",
    # an infinity after the look: update does not hear of it, on the idle rank either
    "idle@2/back:2,step,inf,update",
    # an infinity on the other rank, which is still there when gradients are added
    "@2/back:2,inf,clip,set:-4,back:2,unscale",
    # one gradient as mathematics has it, the other, left over, as torch has it
    "shared@1/back:2,step:1,zero:1,step,update,back:2,step:1,unscale",
    # clipped by hand after the scaler's own clip
    "fused@1/back,clip,handclip,step",
    "fused@1/back:2,clip,zero,back:2,step",
    # a backward onto what a clip or unscale_ has divided, in more roundabout ways
    "fused@1/back:2,clip-loose,update,back:2,set:-4,clip-loose",
    "fused+shared@1/gback:2,clip,gback:1,clip:1",
    "fused@2/back:2,clip,reload,back:2,clip",
    # torch is right there only because it takes a wrapper for another optimizer
    "wrapped@1/back:2,unscale,zero,back:2,clip",
    # a norm over one gradient as mathematics and one as torch has it
    "shared@1/gback:2,handclip:1,zero,gback:2,step,clip:1",
    # a clip that overflows leaves the gradients as they are, and torch divides them
    "shared@2/back:2,inf,clip,step,update,unscale:1",
    # clipped by hand while a kernel still has to divide it: wrong in torch, too
    "fused+shared@1/gback:2,clip,handclip:1,step:1",
    # nan in all three
    "@1/back:2,clip:1,zero:1,back:2,inf:1,handclip:1,step:1",
    "fused@2/back:2,set:-4,retry",
    # a clip that overflowed has divided nothing that must be scaled again
    "shared@1/back:2,inf:1,clip:1,retry",
    # a backward onto gradients that were stepped on before another optimizer raised
    "@2/back:2,step,fail:1@1,back:2,step",
    # one tensor of the user as grad_scale of each step
    "fused@1/back,unscale,user-scale,step,update,zero,back,unscale,user-scale,step",
    # refused, where the norm would be that of a part
    "dtensor+lone@2/back:2,clip",
    # found_inf of gradients whose class is not torch's
    "subclass@1/back:2,inf,clip-and-step,update,zero,back:2,inf,step,update,back,step",
    # divided by a smaller scale than the loss had: an infinity that torch steps with
    "@1/set:126,back:2,set:-4,step",
    # new gradients, in an iteration that has begun anew
    "@2/back:2,back:2,step,fail:1@1,zero,back:2,step",
    # what another optimizer's failure has multiplied by the scale again
    "wrapped@1/back:2,unscale:1,retry,unscale:1",
    # a wrapper whose optimizer has new groups
    "wrapped@1/back,step,update,load,zero,back,unscale,step",
    # a step that one rank alone could not take, and a scale that the user chooses
    "@2/back:2,step,fail:1@1,set:6,back:2,step,step:1,update",
]
# torch's kernel leaves a shared gradient as it is only if it skips
SKIPPED_KERNEL = "fused+shared@1/back:2,inf,step,step:1"
# histories in which our scaler once divided a gradient twice or never
DIVIDED_ONCE = [
    # backwards write through a DTensor, not through its local tensor
    "dtensor+shared@2/back:2,step,back:2,unscale:1",
    "dtensor+shared@2/back:2,step,clear,back:2,step:1",
    # left to a kernel
    "fused@1/back:2,clip,clear,back:2,update,step",
    "fused+wrapped@1/back:2,clip-inner,step",
    "fused@1/back:2,clip,retry",
    "fused@2/back:2,clip,clip:1,retry,update,back:2,step",
    # views of one buffer, of which one is written to
    "buckets+fused@1/back:2,clip,clip:1,step,step:1",
    "buckets+fused@1/back:2,clip,unscale:1,handclip:1,step,step:1",
    "buckets+fused-second@1/back:2,clip,update,clip:1,handclip,step:1",
    "buckets+fused@1/back,step,zero,update,back:2,clip,clip:1,step,step:1",
    "buckets+fused@1/back:2,clip,handclip:1,step",
    # left to a kernel and replaced, while the user keeps the old ones
    "fused@1/back:2,clip,replace,step",
    # left to a kernel and dropped: another optimizer may step
    "fused@1/back:2,clip-inner,zero,back:2,step:1",
]


@pytest.mark.few(30)
class TestOurs(CallHistories):
    scaler = "gradparity.scaler:GradScaler"
    histories = (*FOLLOWED, *DIVIDED_ONCE, SKIPPED_KERNEL)


ACCELERATED = accelerated.__name__


@pytest.mark.slow
class TestSettling(CallHistories):
    """Our scaler acts as in its first iterations on an accelerator."""

    scaler = f"{ACCELERATED}:Settling"
    # a product below the range of fp32 loses digits there: docs/deviations.md
    families = tuple(name for name in FAMILIES if name != "large-scale")
    histories = (*FOLLOWED, *DIVIDED_ONCE, SKIPPED_KERNEL)


@pytest.mark.slow
class TestSettled(CallHistories):
    """Our scaler acts as in later iterations on an accelerator: errors come one sync
    late."""

    scaler = f"{ACCELERATED}:Settled"
    families = tuple(n for n in TestSettling.families if n != "failures")
    histories = (*FOLLOWED, *DIVIDED_ONCE, SKIPPED_KERNEL)


class TestTorch(CallHistories):
    """torch's own scaler on one process equals the oracle."""

    scaler = TORCH
    families = ()
    histories = (
        SKIPPED_KERNEL,
        *(text for text in PLANTED.values() if "@1/" in text),
    )


@pytest.mark.slow
class TestTorchIsNeverFails(CallHistories):
    scaler = TORCH
    families = tuple(name for name in FAMILIES if FAMILIES[name].world_size == 1)


class TestPlain(CallHistories):
    """A correct scaler that is built in another way equals the oracle."""

    scaler = PLAIN
    families = ()
    histories = (
        SKIPPED_KERNEL,
        *(text for text in PLANTED.values() if "@2/" in text),
    )


@pytest.mark.slow
class TestPlainIsNeverFails(CallHistories):
    scaler = PLAIN
    families = tuple(
        name
        for name in FAMILIES
        if name not in ("sparse", "complex", "user-scale", "orders", "failures")
        and name != "two-scalers"  # it is not right in these
    )


class TestSharded(CallHistories):
    scaler = "gradparity.scaler:ShardedGradScaler"
    families = ("calls",)


class TestReportsNoTracker(CallHistories):
    """A scaler need not report its growth tracker."""

    scaler = f"{faulty.__name__}:KeepsItsTrackerToItself"
    families = ()
    histories = ("@2/back,step,inf,update,back,step,update,reload,back,step",)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_fault_departs(name: str, ranks: Ranks) -> None:
    module = planted if hasattr(planted, name) else faulty
    scaler = f"{module.__name__}:{name}"
    assert ranks.departure(parse(PLANTED[name]), scaler, quick=True)


def test_a_clip_at_the_highest_scales_loses_digits_on_an_accelerator() -> None:
    history = parse("scale-120@1/back:2,clip-tiny:1,step:1")
    with Ranks() as made:
        found = made.departure(history, f"{ACCELERATED}:Settling")
    assert found is not None and "should be" in found.text


def test_ranks_in_another_order_are_found(ranks: Ranks) -> None:
    """The plain scaler fails here: its messages do not identify the optimizer."""
    history = parse("@2/back:2,step,step:1,update,back:2,inf,cross@1")
    found = ranks.departure(history, PLAIN)
    assert found is not None and "should be" in found.text


def test_a_difference_is_reported_as_a_line_to_run_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(CallHistories):
        scaler = f"{faulty.__name__}:UnscalesTwice"

    monkeypatch.delenv("HISTORY_MINUTES", raising=False)
    with pytest.raises(pytest.fail.Exception) as caught:
        Mine().test_follows_the_oracle(ranks, "several")
    text = str(caught.value)
    found = re.search(r"in '(\S+)', of", text)
    assert found is not None and "as one of `histories`" in text
    with pytest.raises(pytest.fail.Exception):
        Mine().test_follows_the_oracle(ranks, found[1])


@pytest.mark.slow
def test_the_class_of_the_docs_searches_a_scaler_of_somebody_else(
    tmp_path: Path,
) -> None:
    page = ROOT / "docs" / "mutants.md"
    (block,) = (b for b in blocks(page) if Path(__file__).name in b.tested)
    (tmp_path / "test_mine.py").write_text(block.text)
    (tmp_path / "mine.py").write_text(
        f"from {faulty.__name__} import PlainScaler as GradScaler\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_a_fault_is_found_and_shrunk(ranks: Ranks) -> None:
    scaler = f"{planted.__name__}:DividesEachParameterOnce"
    search = Search(ranks, scaler, "shared")
    search.run(seconds=600, shrink_s=600)
    assert search.smallest is not None and search.departure
    assert search.smallest.words == {"shared"}
    assert len(search.smallest.calls) <= 8


# - The oracle in one process


def outcomes(text: str) -> tuple[list[Any], list[Any]]:
    """Return the right results and torch's in a history of one rank."""
    history = parse(text)
    tracks = tracks_of(history)[:2]
    seen: dict[int, list[Any]] = defaultdict(list)
    for call in history.calls:
        for number, each in enumerate(tracks):
            seen[number].append(each.make(call)[0])
    return seen[0], seen[1]


@pytest.mark.parametrize(
    ("text", "e", "of_torch"),
    [
        ("shared@1/back:2,step,zero:1,back:2,step:1", -1.0, -1.0),
        ("shared@1/back:2,step,step:1", -1.0, -0.5 - 0.5 / 1024),
        ("@1/back,set:6,back,step", -1.0, -(0.5 * 1024 + 0.5 * 64) / 64),
        ("fused@1/back,user-scale,step", -0.125, -0.125),
        ("@1/back,inf,step,update,zero,back,step", -0.5, -0.5),
    ],
)
def test_the_two_oracles_give_the_expected_weights(
    text: str, e: float, of_torch: float
) -> None:
    mathematics, torchs = outcomes(text)
    assert mathematics[-1].state["e"].tolist() == [e] * 3
    assert torchs[-1].state["e"].tolist() == [of_torch] * 3


def test_mathematics_moves_the_scale_as_torch_does() -> None:
    text = "@1/" + ",".join(["zero,back,step,update"] * 5 + ["back,inf,step,update"])
    mathematics, torchs = outcomes(text)
    for ours, theirs in zip(mathematics, torchs, strict=True):
        assert ours.state["the scale"] == theirs.state["the scale"]
        assert ours.state["the growth tracker"] == theirs.state["the growth tracker"]
    scales = {seen.state["the scale"] for seen in mathematics}
    assert scales == {1024.0, 4096.0, 16384.0}, "the rule was not moved"


@pytest.mark.parametrize(
    ("words", "world", "want"),
    [
        ("", 1, (3 * 0.5**2 + 3 * 0.25**2) ** 0.5),
        ("", 2, (3 * 0.5**2 + 3 * 0.25**2) ** 0.5),
        ("dtensor", 2, (3 * 0.5**2 + 3 * 0.25**2) ** 0.5),
        ("permuted", 4, (3 * 0.5**2 + 3 * 0.25**2) ** 0.5),
        ("sparse", 1, (3 * 0.5**2 + 3 * 0.25**2) ** 0.5),
        ("complex", 1, (6 * 0.5**2 + 6 * 0.25**2) ** 0.5),
    ],
)
def test_the_norm_counts_each_element_once(words: str, world: int, want: float) -> None:
    history = parse(f"{words}@{world}/back,clip-loose")
    sides: Track = tracks_of(history)[0]
    for call in history.calls:
        seen = sides.make(call)
    assert [each.value for each in seen] == pytest.approx([want] * world)


def test_a_norm_does_not_overflow() -> None:
    large = [torch.tensor([2.0**531, 2.0**531], dtype=torch.float64)]
    assert norm_of(large, 2.0) == pytest.approx(2.0**531.5)
    assert norm_of(large, 64.0) == pytest.approx(2.0 ** (531 + 1 / 64))
    assert norm_of([torch.tensor([0.0])], 2.0) == 0.0
    assert norm_of([torch.tensor([float("inf")])], 2.0) == float("inf")


# - Text and drawing


@settings(max_examples=50, database=None, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)).flatmap(lambda name: histories(FAMILIES[name]))
)
def test_a_history_is_read_as_it_is_written(history: History) -> None:
    assert parse(str(history)) == history


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nothing@1/step", "unknown history"),
        ("shared/step", "unknown history"),
        ("@0/step", "unknown history"),
        ("@1/leap", "unknown call"),
        ("@1/step:2", "the number must be one of"),
        ("@2/inf:0@2", "the rank below 2"),
    ],
)
def test_a_wrong_history_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse(text)
