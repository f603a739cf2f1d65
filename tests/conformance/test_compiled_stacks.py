"""Compiled workloads run compiled: a wrong compiler is found in every run."""

import shutil
from itertools import cycle, product
from pathlib import Path

import pytest

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.__main__ import main
from gradparity.tests.workloads import compiled_stacks as stacks

MODULE = "gradparity.tests.workloads.compiled_stacks"


def scenario(
    stack: type, recipe: str = "plain", topology: str = "dp2/2", seed: int = 0
) -> Scenario:
    text = f"{topology}/fp32/own/none/model={MODULE}:{stack.__name__},steps=2"
    return Scenario.parse(f"{text},recipe={recipe},seed={seed}")


def failed(case: Case) -> set[str]:
    assert not case.problem, case.problem
    return {v.law for v in case.verdicts if v.status == "fail"}


# Compiling takes most of the time: the first stack is checked in every run, and each of
# the others in one.
WRONG = (
    stacks.WrongFullyShard,
    stacks.WrongDdp,
    stacks.WrongOwnStep,
    stacks.WrongCompiledOptimizer,
    stacks.WrongCompiled,
    stacks.WrongBlocks,
)
EVERY_RUN = (
    *(("dp2/2", recipe) for recipe in ("plain", "accumulate", "frozen")),
    ("dp1/1", "plain"),
)


@pytest.mark.parametrize(
    ("stack", "run"),
    [
        *product(WRONG[:1], EVERY_RUN),
        *zip(WRONG[1:], cycle(EVERY_RUN), strict=False),
    ],
)
@pytest.mark.few(2)
def test_a_wrong_compiler_is_found_in_every_run(
    runner: Runner, stack: type, run: tuple[str, str]
) -> None:
    """Ranks keep compiled code of earlier runs, and all observers are active."""
    in_steps = stack is stacks.WrongCompiledOptimizer
    law = "parity.update" if in_steps else "parity.gradient"
    topology, recipe = run
    case = runner.run("none", scenario(stack, recipe, topology))
    assert law in failed(case)


@pytest.mark.slow
def test_a_replay_says_the_same(runner: Runner, tmp_path: Path) -> None:
    wrong = scenario(stacks.WrongFullyShard)
    assert main(["replay", wrong.id, "--scaler=none", f"--out={tmp_path}"]) == 1
    with Runner(folder=".", timeout_s=60) as fresh:
        cases = [each.run("none", wrong) for each in (runner, fresh)]
    messages = [[(v.law, v.status, v.message) for v in c.verdicts] for c in cases]
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("stack", "recipe"),
    [
        pytest.param(stacks.Compiled, "accumulate", marks=pytest.mark.slow),
        (stacks.Blocks, "recompute"),
        (stacks.FullyShard, "accumulate-no-sync"),
        pytest.param(stacks.FullyShard, "recompute", marks=pytest.mark.slow),
        (stacks.Ddp, "accumulate-no-sync"),
        (stacks.OwnStep, "accumulate"),
        pytest.param(stacks.CompiledOptimizer, "plain", marks=pytest.mark.slow),
        (stacks.CompiledOptimizer, "resume"),
    ],
)
@pytest.mark.few(2)
def test_a_right_compiler_passes(runner: Runner, stack: type, recipe: str) -> None:
    case = runner.run("none", scenario(stack, recipe))
    assert (case.status, case.problem) == ("pass", "")


@pytest.mark.slow
def test_machine_code_passes() -> None:
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler, and there is none")
    with Runner(folder=".", timeout_s=400) as patient:
        case = patient.run("none", scenario(stacks.Inductor, topology="dp1/1"))
    assert (case.status, case.problem) == ("pass", "")


def test_a_model_that_is_compiled_as_a_whole_is_not_recomputed(runner: Runner) -> None:
    case = runner.run("none", scenario(stacks.Compiled, "recompute"))
    assert case.status == "skipped"
    assert "the layout compiles its modules" in case.verdicts[0].message


@pytest.mark.slow
def test_a_warm_rank_compiles_as_often_as_a_new_one(runner: Runner) -> None:
    """More compilations reach Dynamo's limit: code then runs uncompiled, or raises."""
    for seed in range(10):  # a run with the same seed is not made again
        assert failed(runner.run("none", scenario(stacks.WrongByName, seed=seed)))


@pytest.mark.slow
def test_draws_in_compiled_code_are_compared_by_their_states(runner: Runner) -> None:
    case = runner.run("none", scenario(stacks.Dropping, "random"))
    (data,) = (v for v in case.verdicts if v.law == "random.data")
    # the dropout beside the block, and the block: the one inside of it is out of sight
    assert (data.status, data.compared, data.not_compared) == ("pass", 8, 0)


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (stacks.WrongFullyShard, "what came in is right, the output differs by"),
        (stacks.WrongCompiled, "they are compiled as a whole"),
    ],
)
@pytest.mark.slow
def test_a_compiled_module_is_watched_from_outside(
    runner: Runner, stack: type, words: str
) -> None:
    found = runner.localise(runner.run("none", scenario(stack)))
    assert found is not None and words in found.text
