"""Adapters of other projects' scalers: each is checked before it is judged."""

import importlib.util
from collections.abc import Iterator

import pytest

from gradparity.conformance import Runner, Scenario, Status
from gradparity.conformance.peers import SMOKE
from gradparity.fixtures.peers import PEERS

MODULES = {"pytorch-lightning": "pytorch_lightning"}
# fairscale's scaler switches itself off without CUDA, and says so
RUNNABLE = [name for name in PEERS if name != "fairscale"]
GROWS = "single/1/fp32/sgd/none/steps=4,interval=2"
SCALE_HALVED = "fsdp/2/fp32/sgd/inf@r1s1:up.weight/steps=3,interval=100"


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(folder=".", timeout_s=60) as runner:
        yield runner


def need(name: str) -> str:
    """The spec of a peer whose package is there; else the test is skipped."""
    package = PEERS[name].package
    if importlib.util.find_spec(MODULES.get(package, package)) is None:
        pytest.skip(f"{package} is not installed: pip install 'gradparity[peers]'")
    return PEERS[name].spec


def broken(runner: Runner, spec: str, text: str) -> dict[str, str]:
    case = runner.run(spec, Scenario.parse(text))
    return {v.law: v.finding.message for v in case.verdicts if v.status is Status.FAIL}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "torch")) for n in RUNNABLE],
)
def test_adapter_passes_what_every_scaler_gets_right(runner: Runner, name: str) -> None:
    spec = need(name)
    for text in (*SMOKE, SCALE_HALVED):
        assert broken(runner, spec, text) == {}, text


def test_fairscale_says_why_it_is_not_judged(runner: Runner) -> None:
    found = broken(runner, need("fairscale"), SMOKE[0])
    assert "disables itself without CUDA" in found["liveness.completes"]


def test_deepspeed_divides_by_the_scale_of_the_next_step(runner: Runner) -> None:
    found = broken(runner, need("deepspeed"), GROWS)
    # one good step more than the window, and then half the gradient
    assert set(found) >= {"scale.rule", "parity.gradient", "transparency.bitwise"}


@pytest.mark.parametrize("name", ["torch", "lightning", "accelerate"])
def test_growth_in_one_process_is_right_elsewhere(runner: Runner, name: str) -> None:
    assert broken(runner, need(name), GROWS) == {}


def test_torchs_fused_sgd_takes_momentum_that_nobody_wrote(runner: Runner) -> None:
    """B21: uninitialised memory is nan in a judged run, so it shows each time."""
    text = "single/1/fp32/sgd-fused/inf@r0s0:first/steps=3,interval=100"
    assert set(broken(runner, need("torch"), text)) >= {"skip.frozen", "parity.update"}
    assert broken(runner, "gradparity.scaler:GradScaler", text) == {}
