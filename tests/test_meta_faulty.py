"""The judge judged: every faulty scaler is caught by its law, the right one by none."""

from collections.abc import Iterator

import pytest

from gradparity.conformance import LAWS, Runner, Scenario, Status
from gradparity.fixtures.faulty_scalers import FAULTY, PlainScaler

MODULE = "gradparity.fixtures.faulty_scalers"
# Few scenarios that together make every fault visible.
SCENARIOS = [
    "ddp/2/fp32/sgd/none/steps=5",
    "fsdp/2/fp32/adamw/inf@r1s1:up.weight;nan@r0s3:last/steps=5",
    "fsdp/2/fp32/sgd/none/steps=5,scale=1048576",
]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(folder=".", timeout_s=30) as runner:
        yield runner


def failed_laws(runner: Runner, name: str) -> set[str]:
    found: set[str] = set()
    for text in SCENARIOS:
        case = runner.run(f"{MODULE}:{name}", Scenario.parse(text))
        assert case.status is not Status.ERROR, case.problem
        found |= {v.law for v in case.verdicts if v.status is Status.FAIL}
    return found


@pytest.mark.parametrize(
    ("scaler", "law"), FAULTY.items(), ids=lambda x: getattr(x, "__name__", x)
)
def test_faulty_scaler_is_caught_by_its_law(
    runner: Runner, scaler: type[PlainScaler], law: str
) -> None:
    assert law in failed_laws(runner, scaler.__name__)


def test_plain_scaler_is_never_accused(runner: Runner) -> None:
    assert failed_laws(runner, "PlainScaler") == set()


def test_every_law_has_a_scaler_that_breaks_it() -> None:
    assert set(FAULTY.values()) == set(LAWS)
