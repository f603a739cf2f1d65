"""Histories of calls on all ranks: right scalers follow the oracle, wrong do not."""

import io
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from rich.console import Console

from gradparity.conformance.search.call_histories import (
    CALLS,
    ROUND,
    CallSearchSettings,
    histories,
    search_histories,
)
from gradparity.conformance.search.oracle import (
    Call,
    Oracle,
    history_text,
    parse_history,
)

MODULE = "gradparity.fixtures.faulty"
TORCH = "torch.amp:GradScaler"


def searched(database: Path, **settings: object) -> tuple[int, str]:
    output = io.StringIO()
    settings = {"families": (CALLS,)} | settings
    code = search_histories(
        CallSearchSettings(folder=".", database=str(database), **settings),  # type: ignore[arg-type]  # by name
        Console(file=output, width=200),
    )
    return code, output.getvalue()


def _tried(output: str) -> int:
    return int(output.splitlines()[-1].split()[0])


@pytest.mark.usefixtures("counted_budget")
@pytest.mark.parametrize(
    ("scaler", "world_size"),
    [
        ("gradparity.scaler:GradScaler", 2),
        ("gradparity.scaler:ShardedGradScaler", 2),
        (f"{MODULE}:PlainScaler", 3),
        (f"{MODULE}:ExtendsTorch", 2),
        (TORCH, 1),  # on one process torch itself is the rule
    ],
)
def test_a_right_scaler_follows_the_oracle(
    tmp_path: Path, scaler: str, world_size: int
) -> None:
    code, output = searched(tmp_path, scaler=scaler, world_size=world_size, budget_s=5)
    assert code == 0, output
    assert _tried(output) > 5


WRONG = {
    "NeverAgrees": "inf:0@1,step:0@0",
    "BlindToNan": "nan:1@0,step:1@0",
    "ZeroesAndSteps": "both:0@0,step:0@0",
    "GrowsOneStepLate": "step:0@0,update:0@0,step:0@0,update:0@0",
    "KeepsTheTrackerOnBackoff": "step,update,inf:0@1,step,update",
    "UnscalesTwice": "unscale:0@0",
    "AcceptsASecondUnscale": "unscale:0@0,unscale:0@0",
    "AcceptsASecondStep": "step:0@0,step:0@0",
    "AcceptsAClosure": "closure:0@0",
    "RefusesTooLate": "unscale:1@0,unscale:1@0",
    "HasAHiddenCeiling": "set:30,step,update,step,update",
    "AsksTwiceWhenBad": "inf:0@1,step:0@0,update",
}


SLOW = "AsksTwiceWhenBad"  # its ranks wait for each other until they are given up


@pytest.mark.parametrize(
    "scaler",
    [pytest.param(n, marks=[pytest.mark.slow] * (n == SLOW)) for n in sorted(WRONG)],
)
def test_a_wrong_scaler_departs(tmp_path: Path, scaler: str) -> None:
    settings = {"scaler": f"{MODULE}:{scaler}", "world_size": 2}
    history = parse_history(WRONG[scaler], 2)
    code, output = searched(tmp_path, history=history, **settings)
    assert code == 1, output
    assert "departure from the oracle: " in output


@pytest.mark.usefixtures("counted_budget")
def test_a_departure_is_shrunk_and_printed_as_a_command(tmp_path: Path) -> None:
    code, output = searched(
        tmp_path, scaler=f"{MODULE}:AcceptsASecondStep", budget_s=600
    )
    assert code == 1, output
    words = shlex.split(output.splitlines()[-2])
    history = parse_history(words[words.index("--history") + 1], 2)
    assert [call.kind for call in history] == ["step", "step"]


@pytest.mark.usefixtures("counted_budget")
def test_on_ci_every_round_draws_new_histories(tmp_path: Path) -> None:
    """There hypothesis derandomizes by default, and one round would be all."""
    settings.register_profile("as-on-ci", derandomize=True, database=None)
    before = settings.get_current_profile_name()
    settings.load_profile("as-on-ci")
    try:
        _, output = searched(
            tmp_path, scaler="gradparity.scaler:GradScaler", world_size=1, budget_s=5
        )
    finally:
        settings.load_profile(before)
    assert _tried(output) > ROUND, output


def test_torchs_scaler_departs_on_two_ranks(tmp_path: Path) -> None:
    """B01: the verdict travels over the mesh of the first gradient, which is none."""
    code, output = searched(
        tmp_path,
        scaler=TORCH,
        world_size=2,
        history=parse_history("inf:0@1,step:0@0", 2),
    )
    assert code == 1 and "optimizer 0 holds" in output, output


@settings(deadline=None)
@given(histories(2))
def test_a_history_is_read_as_it_is_written(history: tuple[Call, ...]) -> None:
    assert parse_history(history_text(history), 2) == history


@settings(deadline=None)
@given(histories(2))
def test_ranks_of_the_oracle_agree_and_refusals_change_nothing(
    history: tuple[Call, ...],
) -> None:
    ranks = [Oracle(rank=rank, world_size=2) for rank in range(2)]
    for call in history:
        before = [repr(oracle) for oracle in ranks]
        legal = {oracle.after(call) for oracle in ranks}
        assert len(legal) == 1
        if legal == {False}:
            assert [repr(oracle) for oracle in ranks] == before
        assert ranks[0].scale == ranks[1].scale > 0
        assert ranks[0].tracker == ranks[1].tracker < 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("leap:0@0", "unknown call"),
        ("step:2@0", "there are 2 optimizers and 2 ranks"),
        ("inf:0@2", "there are 2 optimizers and 2 ranks"),
        ("", "unknown call"),
    ],
)
def test_a_wrong_history_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_history(text, 2)


@pytest.mark.parametrize("settings", [{"budget_s": 0.0}, {"world_size": 0}])
def test_settings_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="got 0"):
        CallSearchSettings(scaler=TORCH, folder=".", **settings)  # type: ignore[arg-type]  # by name
