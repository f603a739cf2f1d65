"""A tensor-parallel plan of transformers, with gradients laid out unlike parameters."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradparity.conformance import Runner, Scenario
from gradparity.tests.extras import needs

ROOT = Path(__file__).parents[2]


pytestmark = needs("transformers")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    monkeypatch.syspath_prepend(str(ROOT))
    with Runner(folder=str(ROOT), timeout_s=200) as made:
        yield made


def test_qwen3_under_its_own_plan_is_compared(runner: Runner) -> None:
    """Gradients of qwen3 are right, but wrong if micro-batches are accumulated.

    The plan's hook sums the accumulated gradient over ``tp`` at each backward, so what
    came before the last micro-batch is multiplied by the number of ranks. If this no
    longer fails, transformers has fixed it.
    """
    place, settings = "tp2/2/fp32/own/none", "model=examples.qwen3:Stack,steps=2"
    right = runner.run("none", Scenario.parse(f"{place}/{settings}"))
    assert right.status == "pass", (right.problem, right.verdicts)
    compared = {v.law for v in right.verdicts if v.status == "pass"}
    assert compared >= {"parity.gradient", "parity.update", "parity.loss"}

    text = f"{place}/recipe=accumulate,{settings}"
    twice = runner.run("none", Scenario.parse(text))
    assert twice.status == "fail", twice.problem
    told = {v.law: v for v in twice.verdicts if v.status == "fail"}
    assert told.keys() == {"parity.gradient", "parity.update"}
    assert str(told["parity.gradient"].parameter).endswith(
        ("q_norm.weight", "k_norm.weight")
    )
