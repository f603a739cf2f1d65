"""A scenario and its id can be converted to each other; errors name the bad part."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradparity.conformance import Scenario
from gradparity.fixtures import OPTIMIZERS, PARAM_ORDERS, PRECISIONS, TOPOLOGIES

scenarios: st.SearchStrategy[dict[str, object]] = st.builds(
    dict,
    topology=st.sampled_from(sorted(TOPOLOGIES)),
    precision=st.sampled_from(sorted(PRECISIONS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    faults=st.sampled_from(
        ["none", "inf@r0s1:first", "nan@r*s*:last;-inf@r0s0:first!"]
    ),
    model=st.sampled_from(["digits", "text", "text-tied"]),
    steps=st.integers(2, 50),
    seed=st.integers(0, 10**6),
    param_order=st.sampled_from(sorted(PARAM_ORDERS)),
    recipe=st.sampled_from(["plain", "unscale", "accumulate"]),
    init_scale=st.floats(1e-30, 1e30),
    growth_interval=st.integers(1, 5000),
)


@settings(deadline=None)
@given(scenarios)
def test_an_id_gives_the_scenario_back(settings: dict[str, object]) -> None:
    world_size = TOPOLOGIES[str(settings["topology"])].default_world_size
    try:
        scenario = Scenario(world_size=world_size, **settings)  # type: ignore[arg-type]  # drawn by name
    except ValueError:
        return  # parts that do not go together: another test
    assert Scenario.parse(scenario.id) == scenario
    assert Scenario.parse(scenario.id).hash == scenario.hash


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fsdp/2/fp32/sgd", "is not a scenario id"),
        ("nosuch/2/fp32/sgd/none", "unknown topology 'nosuch': expected one of"),
        ("fsdp/x/fp32/sgd/none", "is not a scenario id"),
        ("fsdp/1/fp32/sgd/none", "cannot be built on 1 ranks"),
        ("hsdp/5/fp32/sgd/none", "cannot be built on 5 ranks"),
        ("fsdp/0/fp32/sgd/none", "cannot be built on 0 ranks"),
        ("fsdp/2/fp64/sgd/none", "unknown precision 'fp64'"),
        ("fsdp/2/fp32/lion/none", "unknown optimizer 'lion'"),
        ("fsdp/2/fp32/sgd/zap@r0s0:first", "unknown fault 'zap@r0s0:first'"),
        ("fsdp/2/fp32/sgd/inf@r2s0:first", "names rank 2, but there are 2 ranks"),
        ("fsdp/2/fp32/sgd/inf@r1s0:up.wieght", "names no parameter of digits"),
        ("fsdp/2/fp32/sgd/inf@r1s0:blocks.0.up", "one of first, middle, last, loss,"),
        ("fsdp/2/fp32/sgd/inf@r0s8:first", "names step 8, but there are 8 steps"),
        ("fsdp/2/fp32/sgd/none/steps=no", "setting 'steps=no' is not of type int"),
        ("fsdp/2/fp32/sgd/none/speed=9", "unknown setting 'speed=9'"),
        ("fsdp/2/fp32/sgd/none/steps=0", "at least 1 step"),
        ("fsdp/100000/fp32/sgd/none", "world_size is at most 1024, got 100000: each"),
        ("fsdp/\u00b2/fp32/sgd/none", "is not a scenario id"),
        (f"fsdp/{'9' * 5000}/fp32/sgd/none", "Exceeds the limit"),
        ("fsdp/2/fp32/sgd/none/steps=1000000000000", "steps is at most 1000, got 1000"),
        ("fsdp/2/fp32/sgd/none/steps=1001", "1001: all steps are held in memory"),
        (f"fsdp/2/fp32/sgd/none/steps={'9' * 400}", "got more than 20 digits"),
        ("fsdp/2/fp32/sgd/none/seed=-1", "seed is 0 or more, got -1"),
        ("fsdp/2/fp32/sgd/none/seed=99999999999", "seed is at most 4294967296, got 9"),
        ("fsdp/2/fp32/sgd/none/interval=3000000000", "growth_interval is at most 2147"),
        ("fsdp/2/fp32/sgd/none/scale=nan", "init_scale must be above 0 and below 3.4"),
        ("fsdp/2/fp32/sgd/none/scale=1e300", "below 3.40282e[+]38, got 1e[+]300"),
        ("fsdp/2/fp32/sgd/none/steps=" + "9" * 5000, "9{40} is not of type int"),
        ("fsdp/2/fp32/sgd/none/scale=-1", "got -1"),
        ("fsdp/2/fp32/sgd/none/growth=1", "growth_factor must be above 1"),
        ("fsdp/2/fp32/sgd/none/backoff=1", "backoff_factor must be above 0 and below"),
        ("fsdp/2/fp32/sgd/none/interval=0", "growth_interval must be above 0"),
        ("tp+sp/2/fp32/sgd/none", "cannot lay out the model 'digits'"),
        ("ddp/2/fp16-params/sgd/none", "needs fully_shard"),
        ("pp/2/fp32/sgd/none/recipe=accumulate", "schedule runs the passes"),
    ],
)
def test_bad_ids_are_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        Scenario.parse(text)


def test_scenarios_are_frozen() -> None:
    scenario = Scenario.parse("fsdp/2/fp32/sgd/none")
    with pytest.raises(dataclasses.FrozenInstanceError):
        scenario.steps = 9  # type: ignore[misc]  # that is the point
