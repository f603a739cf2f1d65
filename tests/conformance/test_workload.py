"""User workloads: right ones pass, and messages name the fault of wrong ones."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.__main__ import main
from gradparity.conformance.rank.worker import observe_rank
from gradparity.conformance.report.records import read_report
from gradparity.conformance.space.facts import probe
from gradparity.fixtures import OfWorkload, WorkloadError, resolve_workload
from gradparity.multiprocess import Cluster
from gradparity.tests.workloads import random_stacks, stacks

HERE = Path(__file__).parents[1]
OURS = "gradparity.scaler:GradScaler"
MODULE = "gradparity.tests.workloads.stacks"
NEVER = "gradparity.fixtures.faulty:NeverAgrees"


class DrawsUnseeded(stacks.Right):
    """``batch`` draws from torch's own generator without seeding it."""

    def batch(self, step: int, seed: int) -> stacks.Batch:
        x = torch.randn(16, 8)
        return x, x.abs()[:, :4]


def case(
    runner: Runner,
    stack: type,
    scaler: str = "none",
    place: str = "dp2/2/fp32",
    faults: str = "none",
) -> Case:
    steps = 2 if faults == "none" else 4
    text = f"{place}/own/{faults}/model={MODULE}:{stack.__name__},steps={steps}"
    return runner.run(scaler, Scenario.parse(text))


def failed(case: Case) -> set[str]:
    return {v.law for v in case.verdicts if v.status == "fail"}


@pytest.mark.parametrize("scaler", ["none", OURS])
@pytest.mark.parametrize(
    ("stack", "place"),
    [
        (stacks.Right, "single/1/fp32"),
        (stacks.Right, "dp2/2/fp32"),
        (stacks.Right, "dp2/2/bf16-autocast"),
        (stacks.Right, "dp2-tp2/4/fp32"),
        (stacks.Nested, "dp2/2/fp32"),
    ],
)
def test_a_right_stack_passes(
    runner: Runner, stack: type, place: str, scaler: str
) -> None:
    found = case(runner, stack, scaler, place)
    assert found.status == "pass", (found.problem, failed(found))
    compared = {v.law for v in found.verdicts if v.status == "pass"}
    assert {"parity.gradient", "parity.update", "parity.loss"} <= compared
    if scaler == "none":
        reasons = {v.message for v in found.verdicts if v.law == "scale.rule"}
        assert reasons == {"a check of scalers, and this run has no scaler"}
        assert not any(law.startswith(("scale", "transparency")) for law in compared)


def test_a_wrong_scaler_is_caught_on_a_right_stack(runner: Runner) -> None:
    found = case(runner, stacks.Right, NEVER, "dp2-tp2/4/fp32", "inf@r3s1:0.weight")
    assert "agreement.scale" in failed(found)
    ours = case(runner, stacks.Right, OURS, "dp2-tp2/4/fp32", "inf@r3s1:0.weight")
    assert ours.status == "pass"


@pytest.mark.parametrize(
    ("stack", "law", "words"),
    [
        (stacks.ForgetsAllReduce, "agreement.replicas", "differs from its replica"),
        (stacks.ForgetsOneBias, "agreement.replicas", "2.bias"),
        (stacks.SumsForMean, "parity.gradient", "differs from the fp64 truth"),
        (stacks.SlightlyOff, "parity.gradient", "0.weight"),
        (stacks.BiasOnOneRank, "agreement.replicas", "2.bias on rank 1"),
        pytest.param(
            *(stacks.StrayCollective, "collectives.no-crosstalk", "checked all-reduce"),
            marks=pytest.mark.slow,  # waits twice for the limit of a call
        ),
    ],
)
def test_a_wrong_workload_is_caught_and_no_check_of_scalers_fails(
    runner: Runner, stack: type, law: str, words: str
) -> None:
    found = case(runner, stack)
    told = {v.law: v.message for v in found.verdicts if v.status == "fail"}
    assert words in told[law], told
    checked = case(runner, stack, OURS)
    assert checked.status == "inconclusive"
    assert failed(checked) == set()
    assert "the stack is wrong without any scaler" in checked.verdicts[0].message


def test_elements_are_read_once_for_all_scalers(runner: Runner) -> None:
    # without a scaler: element numbers, then the layout; with one, that layout only
    assert case(runner, stacks.LaidOutThreeTimes, OURS).status == "pass"


def layouts_of(recipes: list[str]) -> list[int]:
    """Return how often this rank lays out the workload in each recipe."""
    made: list[nn.Module] = []
    lay_out = stacks.Nested.parallelize

    def counted(self: stacks.Nested, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        made.append(model)
        return lay_out(self, model, mesh)

    found = []
    with pytest.MonkeyPatch.context() as patched:  # of this rank alone
        patched.setattr(stacks.Nested, "parallelize", counted)
        for recipe in recipes:
            made.clear()
            text = f"dp2/2/fp32/own/none/model={MODULE}:Nested,steps=4,recipe={recipe}"
            observe_rank(Scenario.parse(text), "none", ".")
            found.append(len(made))
    return found


def test_elements_are_read_anew_where_a_layout_is_given_another_model() -> None:
    recipes = ["plain", "accumulate", "recompute", "plain", "frozen"]
    with Cluster(2) as cluster:
        made = cluster.run(layouts_of, recipes)
    # the layout that is checked, and before it the one that is read
    assert made == [[2, 1, 2, 2, 2]] * 2


def test_a_nondeterministic_stack_is_not_held_against_a_scaler(runner: Runner) -> None:
    found = case(runner, stacks.Nondeterministic, OURS)
    told = {v.law: v for v in found.verdicts}
    assert failed(found) == set() and found.status == "inconclusive"
    for law in ("transparency.gradient", "transparency.bitwise"):
        assert told[law].status == "inconclusive"
        assert "made twice, differs from itself in the gradient" in told[law].message
    assert told["parity.gradient"].status == "pass"


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (stacks.OtherModelOnRank1, "model: gave another 0.weight on rank 1"),
        (stacks.OtherBatchOnRank1, "batch: gave another tensor 0 on rank 1"),
        (stacks.RaisesOnRank1, "rank 1, parallelize: raised RuntimeError: no such"),
        (stacks.BackwardRaises, "backward: raised RuntimeError: out of buckets"),
        (stacks.Initialises, "parallelize: changed the values of 0.weight"),
        (
            stacks.RoundsOneBias,
            "changed the values of 0.bias: 8 of 8 elements on this rank are not those "
            "of model() but those rounded to torch.bfloat16",
        ),
        (
            stacks.LaidOutOnce,
            "parallelize: raised RuntimeError: already initialised (stacks.py in "
            "parallelize, line",
        ),
        (stacks.LaidOutOnce, "its second call: with weights(stack) a model is laid"),
        (stacks.OtherRowsEachTime, "changed the values of 0.weight: 32 of 32 elements"),
        (stacks.OtherSizesEachTime, "parallelize: lays the model out differently when"),
        (stacks.Renames, "parallelize: gave the parameter 'inner.0.weight'"),
        (
            stacks.Unties,
            "head.weight is tied to table.weight in model(), and not",
        ),
        (stacks.RaisesOnRank1, "(stacks.py in parallelize, line"),
        # only the line of the workload: those of torch and of the harness are left out
        (stacks.CollectiveRaises, "op=dist.ReduceOp.BAND))"),
        (stacks.LosesHalf, "parallelize: no rank holds 32 of 64 elements of 0.weight"),
        (stacks.Dies, "rank 1: exited with code 9"),
        (stacks.LeavesOnRank1, "rank 1, parallelize: raised SystemExit: no GPU"),
    ],
)
@pytest.mark.few(11)
def test_a_stack_that_breaks_is_an_error_and_no_verdict(
    runner: Runner, stack: type, words: str
) -> None:
    found = case(runner, stack)
    assert found.status == "error"
    assert words in found.problem
    assert found.verdicts == ()


def test_a_stack_that_breaks_is_an_error_with_any_scaler(runner: Runner) -> None:
    alone, found = (case(runner, stacks.RaisesOnRank1, of) for of in ("none", OURS))
    assert found.status == "error"
    assert "the stack is wrong without any scaler" in found.problem
    assert found.problem.endswith(alone.problem)
    assert found.verdicts == ()


def shapes_of_torch() -> str:
    """Return the text of torch's error for the shapes of ``WrongShapes``."""
    with pytest.raises(RuntimeError) as raised:
        nn.Linear(8, 8)(torch.ones(16, 9))
    return str(raised.value)


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (stacks.NoOptimizer, "has no optimizer: it needs model, batch, loss"),
        (stacks.PipelineAxis, "meshes: got {'pp': 2}"),
        (stacks.NoMeshes, "meshes: got 2, expected one or more"),
        (stacks.PropertyRaises, "an attribute: raised RuntimeError: not set yet"),
        (stacks.ModelExits, "model: raised SystemExit: 3"),
        (stacks.TakesNoMesh, "parallelize: takes (model), expected (model, mesh"),
        (stacks.LossIsNone, "loss: got None, expected a method"),
        (stacks.ForwardRaises, "(stacks.py in forward, line"),
        (stacks.RandomModel, "model: 0.weight has other values when made again"),
        (stacks.RandomBatch, "batch: gave other numbers for the same step and seed"),
        (DrawsUnseeded, "batch: gave other numbers for the same step and seed"),
        (stacks.UnevenBatch, "batch: raised ValueError: a batch needs tensors with"),
        (stacks.OneTensor, "batch: returned Tensor, expected (inputs, targets)"),
        (stacks.WrongShapes, f"forward: raised RuntimeError: {shapes_of_torch()}"),
        (stacks.LossPerRow, "loss: returned a tensor of shape [16]"),
        (stacks.SummedLoss, "the loss must be a mean over them"),
        (stacks.BatchNorm, "the loss must be a mean over them"),
        (random_stacks.AlwaysRandom, "forward: gave the losses"),
        (stacks.UsesNothing, "backward: gave no gradient but zero to any of 0.weight"),
        (stacks.HalfModel, "is torch.float16 on cpu, expected torch.float32"),
        (stacks.LeavesOut, "optimizer: was given 0.bias and left it out"),
    ],
)
def test_bad_workloads_are_usage_errors(
    stack: type,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = f"{stack.__module__}:{stack.__name__}"
    report = tmp_path / "report.jsonl"
    assert main(["run", "--workload", spec, f"--report={report}"]) == 2
    told = capsys.readouterr().err
    assert f"workload {spec}: " in told
    assert words in told
    assert told.count("\n") == 1
    assert not report.exists()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("ema", "ema: returned [tensor([1., 1.])], expected a dict of name -> tensor"),
        ("skipped_steps", "skipped_steps: returned 'none', expected a whole number"),
    ],
)
def test_what_a_trainer_says_of_itself_is_checked(call: str, words: str) -> None:
    resolved = resolve_workload(f"{MODULE}:SaysNonsense")
    with pytest.raises(WorkloadError) as refused:
        getattr(resolved, call)(None)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workload", "nosuch:Stack"], "cannot import"),
        (["--workload", f"{MODULE}:Nothing"], "has no attribute 'Nothing'"),
        (["--workload", "stacks"], "is not module:attribute"),
        (["--workload", f"{MODULE}:Right", "--model", "text"], "has its own model"),
        (["--workload", f"{MODULE}:Right", "--topology", "fsdp"], "unknown topology"),
        (["--workload", f"{MODULE}:Right", "--optimizer", "sgd"], "unknown optimizer"),
        (["--workload", f"{MODULE}:Right", "--precision", "fp16-params"], "leaves no"),
        (["--scaler", "none", "--scaler", OURS], "give no other"),
        (
            ["--workload", f"{MODULE}:Right", "--workload", f"{MODULE}:Nested"],
            f"a run has one workload: got {MODULE}:Right and {MODULE}:Nested",
        ),
        (
            ["--workload", f"{MODULE}:Right", "--scenario", "ddp/2/fp32/sgd/none"],
            "give no --workload beside --scenario",
        ),
        (
            ["--precision", "fp32", "--scenario", "ddp/2/bf16-autocast/sgd/none"],
            "give no --precision beside --scenario",
        ),
        (
            ["--scaler", "none", "--scenario", "ddp/2/fp32/sgd/inf@r0s0:first"],
            "cannot be trained without a scaler",
        ),
    ],
)
def test_bad_options_are_usage_errors(
    options: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", *options]) == 2
    assert words in capsys.readouterr().err


def command(
    folder: Path, python: list[str], *words: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_the_example_runs_and_replays(tmp_path: Path, warm_ranks: list[str]) -> None:
    words = ["-m", "gradparity.conformance", "run", "--scaler=none", "--preset=parity"]
    words += [
        "--workload=examples.workload:Stack",
        "--world-size=2",
        f"--out={tmp_path}",
    ]
    done = command(HERE.parent, warm_ranks, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(tmp_path / "report.jsonl")
    assert {c.status for c in report.cases} == {"pass"}
    assert [*report.header.data] == ["examples.workload:Stack"]
    again = ["replay", report.cases[0].scenario, "--scaler=none", f"--out={tmp_path}"]
    assert command(HERE.parent, warm_ranks, *words[:2], *again).returncode == 0


def test_a_hunt_finds_a_fault_in_a_stack(tmp_path: Path, warm_ranks: list[str]) -> None:
    words = ["-m", "gradparity.conformance", "hunt", "--scaler=none", "--budget=2s"]
    words += ["--workload=stacks:SumsForMean", "--world-size=2"]
    (tmp_path / "stacks.py").write_text((HERE / "workloads" / "stacks.py").read_text())
    done = command(tmp_path, warm_ranks, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "violation of parity." in done.stdout
    assert "model=stacks:SumsForMean" in done.stdout


@pytest.mark.slow
def test_under_torchrun_the_ranks_find_the_workload(
    tmp_path: Path, warm_ranks: list[str]
) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += [
        "--no-python",
        *warm_ranks,
        "-m",
        "gradparity.conformance",
        "run",
        "--workload=stacks:Right",
    ]
    words += ["--preset=parity", "--topology=dp2", "--out=out"]
    (tmp_path / "stacks.py").write_text((HERE / "workloads" / "stacks.py").read_text())
    done = command(tmp_path, warm_ranks, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(read_report(tmp_path / "out" / "report.jsonl").cases) == 3


@pytest.mark.slow
def test_the_pytest_plugin_takes_a_workload(
    tmp_path: Path, warm_ranks: list[str]
) -> None:
    (tmp_path / "stacks.py").write_text((HERE / "workloads" / "stacks.py").read_text())
    options = [
        "--gradparity-scaler=none",
        "--gradparity-workload=stacks:ForgetsOneBias",
        "--gradparity-quick",
        "--gradparity-topology=dp2",
        "-x",
    ]
    done = command(tmp_path, warm_ranks, "-m", "pytest", "-q", *options)
    assert done.returncode == 1, done.stdout
    assert "agreement.replicas" in done.stdout


@pytest.mark.parametrize(
    ("biases", "names", "can"),
    [
        (True, ("up", "down"), True),
        (False, ("up", "down"), False),
        (False, ("up", "experts"), True),
        (True, ("experts",), False),
    ],
)
def test_two_optimizers_need_parameters_for_both(
    biases: bool, names: tuple[str, ...], can: bool
) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=biases) for name in names})
    workload = replace(resolve_workload(f"{MODULE}:Right"), model=lambda: model)
    told = probe(workload).lacks.get(OfWorkload.TWO_KINDS, "")
    assert ("does not train both" in told) is not can


def test_two_optimizers_need_parameters_that_train_for_both() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("up", "down")})
    for layer in model.values():
        layer.bias.requires_grad_(False)
    workload = replace(resolve_workload(f"{MODULE}:Right"), model=lambda: model)
    told = probe(workload).lacks[OfWorkload.TWO_KINDS]
    assert told.endswith("does not train both")
