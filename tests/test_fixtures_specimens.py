"""The specimens: every pair builds, differs in its fault alone, and some are judged."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gradparity.conformance import Runner, Scenario
from gradparity.conformance.spec import NO_SCALER
from gradparity.fixtures import kit_of
from gradparity.fixtures.specimens import SPECIMENS, Pair

PARAMETERS = 10_000
RANKS = 4
NAMES = list(SPECIMENS)
FOLDER = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_says_what_it_is(name: str) -> None:
    pair = SPECIMENS[name]
    assert pair.name.endswith(f":{name}")
    assert len(pair.fault) <= 80
    assert "\n" not in pair.fault
    assert pair.source
    assert bool(pair.laws) == (name != "W19")


def test_at_least_22_of_the_known_faults_are_shown() -> None:
    known = [pair for name, pair in SPECIMENS.items() if name.startswith("W")]
    assert sum(bool(pair.laws) for pair in known) >= 22


def twins(pair: Pair) -> Iterator[tuple[str, nn.Module]]:
    for spec in (pair.broken, pair.fixed):
        torch.manual_seed(0)
        yield spec, kit_of(spec).model()


@pytest.mark.parametrize("name", NAMES)
def test_both_twins_are_one_model_on_one_process(name: str) -> None:
    losses, weights = [], []
    for spec, model in twins(SPECIMENS[name]):
        kit = kit_of(spec)
        assert sum(p.numel() for p in model.parameters()) <= PARAMETERS
        assert max(t.default_world for t in kit.topologies.values()) <= RANKS
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        batch = kit.batch(0, 0)
        found = kit.loss(model(batch.inputs), batch.targets)
        value = found[0] / found[1] if isinstance(found, tuple) else found
        losses.append(value.item())
        weights.append({n: p.detach() for n, p in model.named_parameters()})
    assert math.isfinite(losses[0])
    assert losses[0] == losses[1]
    broken, fixed = weights
    assert broken.keys() == fixed.keys()
    assert all(torch.equal(broken[n], fixed[n]) for n in broken)


JUDGED = {
    "W01": ("tp2/2/fp32/own/none/recipe=accumulate", "parity.gradient"),
    "W18": ("tp2/2/fp32/own/none", "parity.update"),
    "W29": ("cp2/2/fp32/own/none", "parity.gradient"),
}
"""Name -> a scenario that shows the fault, and a law that says so."""


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(folder=str(FOLDER)) as found:
        yield found


@pytest.mark.parametrize("name", JUDGED)
def test_the_judge_tells_the_twins_apart(runner: Runner, name: str) -> None:
    text, law = JUDGED[name]
    pair = SPECIMENS[name]
    joined = "," if "=" in text else "/"
    cases = [
        runner.run(NO_SCALER, Scenario.parse(f"{text}{joined}data={spec},steps=3"))
        for spec in (pair.broken, pair.fixed)
    ]
    failed = [[v.law for v in c.verdicts if v.status.value == "fail"] for c in cases]
    assert law in failed[0]
    assert failed[1] == []
    assert cases[1].status.value == "pass"
