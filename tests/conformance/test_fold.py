"""Fold: which rank decides and steps which parameter, from tables of events."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gradparity.conformance.rank.fold import fold, steps_again
from gradparity.conformance.rank.trace import (
    Event,
    Group,
    Kind,
    RankTrace,
    Setting,
    StepTrace,
)

NAMES = ("a", "b", "c")
Steps = Sequence[Sequence[Event]]


def of(kind: Kind, number: int, names: str = "", nodes: int = 0, **more: Any) -> Event:
    """Return an event of an optimizer with these parameters, all with gradients."""
    groups = (Group(tuple(names), more.pop("settings", {})),)
    more = {"with_grad": frozenset(names)} | more
    return Event(kind=kind, optimizer=number, groups=groups, nodes=nodes, **more)


def step(number: int, names: str = "", *inside: Event, **more: Any) -> list[Event]:
    """Return the events of a step of an optimizer, with the events inside it."""
    used = {"recorded": frozenset(names), "written": frozenset(names)} | more
    return [
        of(Kind.BEGINS, number, names),
        of(Kind.USES, number, names, **used),
        *inside,
        Event(kind=Kind.STEPPED, optimizer=number, nodes=more.get("nodes", 0)),
    ]


def handed(number: int, names: str = "", *inside: Event, **more: Any) -> list[Event]:
    """Return the events of a scaler's call, with the events inside it."""
    end = Event(kind=Kind.RETURNED, optimizer=number)
    return [of(Kind.HANDED, number, names, **more), *inside, end]


def changed(number: int) -> Event:
    return Event(kind=Kind.CHANGED, optimizer=number)


def trace(
    rank: int, steps: Steps, held: str = "abc", shard: str = "whole"
) -> RankTrace:
    """Return the trace of a rank that has each gradient which an event recorded."""
    found = RankTrace(
        rank=rank,
        coordinate={},
        index={name: np.arange(2) for name in held},
        shards=dict.fromkeys(held, shard),
        trains=frozenset(held),
    )
    for number, events in enumerate(steps):
        there = {name for event in events for name in event.recorded}
        seen = StepTrace(step=number, complete=True, events=list(events))
        seen.gradients = {name: np.ones(2, np.float32) for name in sorted(there)}
        found.steps.append(seen)
    return found


def folded(*ranks: Steps, **more: Any) -> tuple[RankTrace, ...]:
    return fold([trace(rank, steps, **more) for rank, steps in enumerate(ranks)])


# - Decision groups


@pytest.mark.parametrize(
    ("ranks", "groups"),
    [
        pytest.param([[step(0, "abc")]], ["abc"], id="one"),
        pytest.param([[step(0, "bc") + step(1, "a")]], ["bc", "a"], id="two"),
        pytest.param([[step(0, "ab")]], ["ab", "c"], id="c has none"),
        pytest.param([[step(0, "ab") + step(1)]], ["ab", "c"], id="copies of c"),
        pytest.param([[step(0, "abc") + step(1)]], ["abc"], id="beside the model"),
        pytest.param([[step(0) + step(1)]], ["abc"], id="copies alone"),
        pytest.param([[[]]], ["abc"], id="never seen"),
        pytest.param(
            [[step(0, "a") + step(1, "b"), step(0, "ab")]],
            ["ab", "c"],
            id="together later",
        ),
        pytest.param([[step(0, "abc", *step(1, "a"))]], ["abc"], id="inside"),
        pytest.param(
            [[step(0, "", *step(1, "a"), *step(2, "bc"))]],
            ["abc"],
            id="inside of one that has none itself",
        ),
        pytest.param(
            [[handed(0, "", *step(1, "a"), *step(2, "bc"))]],
            ["abc"],
            id="a wrapper that the scaler is handed",
        ),
        pytest.param(
            [[handed(0, "bc") + handed(1, "a"), handed(1, "a", *step(1, "a"))]],
            ["bc", "a"],
            id="handed and not stepped",
        ),
        pytest.param([[step(0, "a")], [step(0, "bc")]], ["abc"], id="ZeRO"),
        pytest.param(
            [[step(0, "a") + step(1, "b")], [step(0, "c")]],
            ["ac", "b"],
            id="a rank without the second",
        ),
        pytest.param(
            [[step(0, "a") + step(1, "bc")], [step(0, "bc"), step(1, "a")]],
            ["abc"],
            id="another order on a rank",
        ),
        pytest.param(
            [[step(0, "a") + step(1, "b")], [step(0, "b")], [step(0, "bc")]],
            ["a", "bc"],
            id="ranks without the first, that share the second",
        ),
    ],
)
def test_a_decision_group_is_what_was_ever_together(
    ranks: list[Steps], groups: list[str]
) -> None:
    for one in folded(*ranks):
        assert one.owned == [[*group] for group in groups]
        assert all(len(seen.decisions) == len(groups) for seen in one.steps)


ALONE = step(0, "c")
TWO = step(0, "a") + step(1, "b")


@pytest.mark.parametrize(
    ("ranks", "counts"),
    [
        pytest.param([TWO, ALONE], (2, 1), id="a rank that shares nothing"),
        pytest.param([TWO, step(0, "b"), ALONE], (2, 1, 1), id="one of three"),
        pytest.param([TWO, step(0, "bc")], (), id="a shared parameter"),
        pytest.param([TWO, step(7) + ALONE], (), id="a stand-in for the first"),
        pytest.param([step(0, "abc", *step(1, "a")), ALONE], (), id="one inside"),
        pytest.param([step(0, "abc") + step(1), step(0, "abc")], (), id="beside"),
        pytest.param([ALONE, []], (), id="a rank that never stepped"),
    ],
)
def test_ranks_with_fewer_optimizers_are_joined_by_shared_parameters(
    ranks: list[Sequence[Event]], counts: tuple[int, ...]
) -> None:
    for one in folded(*([events] for events in ranks)):
        assert one.unjoined == counts


def test_a_pipeline_decides_together_and_a_rank_for_what_it_holds() -> None:
    first = trace(0, [[*step(0, "a"), changed(0)]], held="a")
    second = trace(1, [step(0, "bc")], held="bc")
    first.steps[0].changed = frozenset("a")
    second.steps[0].raw = {"b": True, "c": False}
    first, second = fold([first, second])
    assert first.owned == second.owned == [["a", "b", "c"]]
    (one,), (other,) = first.steps[0].decisions, second.steps[0].decisions
    assert (one.non_finite, one.parameters_changed, one.state_changed) == (
        *([], True),
        True,
    )
    assert (other.non_finite, other.parameters_changed, other.state_changed) == (
        *(["b"], False),
        False,
    )


def test_a_state_that_changes_inside_counts_for_the_whole_group() -> None:
    events = [*step(0, "ab", *step(1)), *step(2, "c"), changed(1)]
    (found,) = folded([events])
    assert [d.state_changed for d in found.steps[0].decisions] == [True, False]


def test_what_does_not_train_here_has_not_stayed_as_it_was() -> None:
    one = trace(0, [[*step(0, "a"), *step(1, "bc")]])
    one.trains = frozenset("bc")
    (found,) = fold([one])
    moved = [d.parameters_changed for d in found.steps[0].decisions]
    assert moved == [None, False]


def test_a_gradient_is_bad_as_the_scaler_found_it_or_else_as_it_was_used() -> None:
    one = trace(0, [step(0, "abc")])
    one.steps[0].raw = {"a": True, "b": False}
    for name in "bc":
        one.steps[0].gradients[name][0] = np.inf
    (found,) = fold([one])
    assert found.steps[0].non_finite == ["a", "c"]


def test_a_step_that_did_not_end_has_no_decision() -> None:
    one = trace(0, [step(0, "abc")])
    one.steps[0].complete = False
    (found,) = fold([one])
    assert found.steps[0].decisions == []


# - Who steps what


def used(found: RankTrace) -> tuple[str, str]:
    """Return the names of the gradients of step 0, and of ``left``, each as a word."""
    return "".join(found.steps[0].gradients), "".join(sorted(found.left))


def test_of_an_optimizer_and_those_inside_the_inner_ones_count() -> None:
    """ZeRO-1: the outer optimizer steps parameters that no inner one has."""
    first, second = folded(
        [step(0, "abc", *step(1, "a", recorded=frozenset()))],
        [step(0, "abc", *step(1, "b", recorded=frozenset()))],
    )
    assert used(first) == ("ac", "b")
    assert used(second) == ("bc", "a")


def test_inner_optimizers_of_other_elements_take_nothing() -> None:
    one = trace(0, [step(0, "abc", *step(1, "a"))], shard="first half")
    other = trace(1, [step(0, "abc", *step(1, "b"))], shard="second half")
    for found in fold([one, other]):
        assert used(found) == ("abc", "")
    replicas = [trace(rank, [step(0, "abc")], shard="first half") for rank in (0, 1)]
    for found in fold([*replicas, other])[:2]:
        assert used(found) == ("abc", "")


def test_what_nobody_uses_is_left_to_nobody() -> None:
    for found in folded([step(0, "ab")], [step(0, "ab")]):
        assert used(found) == ("ab", "")


def test_a_parameter_of_another_ranks_optimizer_is_left_to_it() -> None:
    first, second = folded([step(0, "a")], [step(0, "bc")])
    assert (used(first), used(second)) == (("a", "bc"), ("bc", "a"))
    first, second = folded([step(0, "a"), step(0, "abc")], [step(0, "bc")] * 2)
    assert (used(first), used(second)) == (("a", ""), ("bc", "a"))


# - Settings


def rate(value: float) -> dict[str, Setting]:
    return {"lr": value}


@pytest.mark.parametrize(
    ("events", "rates"),
    [
        pytest.param(step(0, "ab", settings=rate(1)), {"a": 1, "b": 1}, id="stepped"),
        pytest.param(
            handed(0, "a", *step(0, "a", settings=rate(2)), settings=rate(1)),
            {"a": 1},
            id="handed: the scaler may change it in its call",
        ),
        pytest.param(
            handed(0, "a", settings=rate(1)) + handed(0, "a", settings=rate(2)),
            {"a": 2},
            id="handed twice",
        ),
        pytest.param(
            step(0, "ab", *step(1, "a", settings=rate(2)), settings=rate(1)),
            {"a": 2, "b": 1},
            id="inside",
        ),
        pytest.param(
            step(0, "ab", settings=rate(1), with_grad=frozenset("a")),
            {"a": 1},
            id="b has no gradient",
        ),
        pytest.param(
            step(0, "ab", settings=rate(1), with_grad=frozenset()),
            {"a": 1, "b": 1},
            id="it keeps its own gradients",
        ),
        pytest.param(step(0, "ab"), {}, id="not known"),
    ],
)
def test_settings_are_those_that_a_parameter_is_stepped_with(
    events: list[Event], rates: dict[str, float]
) -> None:
    (found,) = folded([events])
    assert found.steps[0].settings == {n: {"lr": value} for n, value in rates.items()}
    assert found.steps[0].copies == []


def test_settings_of_copies_are_those_of_each_group() -> None:
    groups = (Group((), rate(1)), Group((), rate(2)))
    of_two = Event(kind=Kind.USES, optimizer=1, groups=groups)
    (found,) = folded([[*step(0, "a", settings=rate(3)), of_two, of_two]])
    assert found.steps[0].copies == [{"lr": 1}, {"lr": 2}]
    assert found.steps[0].settings == {"a": {"lr": 3}}


# - Order


AGAIN = of(Kind.USES, 0, "a", nodes=9, written=frozenset("a"))
"""Event of a closure that evaluates the loss once more."""


@pytest.mark.parametrize(
    ("events", "late"),
    [
        pytest.param(step(0, "a", nodes=5) + step(1, "b", nodes=5), "", id="no pass"),
        pytest.param(step(0, "a", nodes=5) + step(1, "b", nodes=9), "b", id="turns"),
        pytest.param(
            step(0, "a", nodes=5) + step(1, "b", nodes=9, written=frozenset()),
            "",
            id="a sum of losses is logged",
        ),
        pytest.param(step(0, "a", nodes=5) + step(1, nodes=9), "bc", id="of copies"),
        pytest.param(
            handed(0, "a", nodes=3) + step(0, "a", nodes=5), "", id="only handed"
        ),
        pytest.param(
            step(0, "a", *step(1, "a", nodes=5), nodes=5), "", id="one inside"
        ),
        pytest.param(
            [
                *step(
                    0,
                    "a",
                    AGAIN,
                    nodes=5,
                )
            ],
            "a",
            id="LBFGS",
        ),
        pytest.param(
            step(0, "a", AGAIN, nodes=5) + step(1, "b", nodes=5),
            "ab",
            id="after LBFGS",
        ),
        pytest.param(
            step(0, "a", of(Kind.USES, 0, "a", nodes=5), nodes=5), "", id="super().step"
        ),
    ],
)
def test_late_is_what_a_forward_with_moved_weights_has_made(
    events: list[Event], late: str
) -> None:
    (found,) = folded([events])
    assert "".join(found.steps[0].late) == late


@pytest.mark.parametrize(
    ("events", "again"),
    [
        pytest.param(step(0, "a") + step(1, "bc"), None, id="others"),
        pytest.param(step(0, "a") + step(0, "a"), 0, id="twice"),
        pytest.param(step(0, "ab") + step(1, "bc"), 1, id="shared"),
        pytest.param(step(0, "abc", *step(1, "a")), None, id="inside"),
        pytest.param(
            handed(0, "a") + handed(0, "a", *step(0, "a")), None, id="handed twice"
        ),
        pytest.param(step(0) + step(0), None, id="nothing of the model"),
    ],
)
def test_the_optimizer_that_steps_a_parameter_again_is_found(
    events: list[Event], again: int | None
) -> None:
    assert steps_again(events) == again


def test_an_optimizer_that_raised_is_no_longer_under_way() -> None:
    raised = of(Kind.BEGINS, 1, "c")
    (found,) = folded([[*step(0, "a", raised), *step(2, "b")]])
    assert found.owned == [["a", "c"], ["b"]]
