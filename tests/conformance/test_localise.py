"""Location of the first wrong value: module, ranks and factor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradparity.conformance import Runner, Scenario
from gradparity.conformance.__main__ import main
from gradparity.conformance.comparison.boundaries import Boundaries, _Found
from gradparity.conformance.comparison.compare import multiple_of
from gradparity.conformance.comparison.diagnosis import is_sum_of
from gradparity.conformance.comparison.localise import _common, _times
from gradparity.conformance.rank.modules import (
    INPUT,
    OUTPUT_GRADIENT,
    Boundary,
    is_whole,
    module_names,
    names_of,
    watch_modules,
)
from gradparity.conformance.report.page import render_page
from gradparity.conformance.report.records import Location, read_report
from gradparity.conformance.report.terminal import print_report
from gradparity.conformance.run.session import RunSettings
from gradparity.tests.workloads import misplaced
from gradparity.tests.workloads.steps import Engine, Trains

MODULE = "gradparity.tests.workloads.misplaced"
TWICE = "gradparity.fixtures.faulty:UnscalesTwice"


def own(stack: type, place: str = "tp2/2/fp32", more: str = "steps=1") -> str:
    return f"{place}/own/none/model={MODULE}:{stack.__name__},{more}"


def located(runner: Runner, id: str, scaler: str = "none") -> Location:
    case = runner.run(scaler, Scenario.parse(id))
    assert not case.problem
    found = runner.localise(case)
    assert found is not None
    failed = any(
        v.status == "fail" for v in case.verdicts if v.law.startswith("parity")
    )
    assert failed == (found.where != "nowhere"), found.text
    return found


RIGHT = [
    own(misplaced.Right, "tp2/2/fp32"),
    own(misplaced.Right, "dp2/2/fp32"),
    own(misplaced.RightSequence),
    own(misplaced.RightSharded, "dp2/2/fp32"),
    own(misplaced.RightPipeline, "stages2/2/fp32"),
    own(misplaced.SequenceStepsTwice),
    own(misplaced.RightJoinedNorm, "dp2/2/fp32"),
]
MORE_THAT_ARE_RIGHT = [
    own(misplaced.ShardedStepsTwice, "dp2/2/fp32"),
    "dp2/2/fp32/own/none/model=gradparity.examples.gan:Gan,steps=2",
    own(misplaced.StepsTwice, "dp2/2/bf16-autocast", "steps=2,recipe=accumulate"),
    own(misplaced.StepsTwice, "dp2-tp2/4/fp32"),
    own(misplaced.Right, "dp2/2/bf16-autocast", "steps=2,recipe=accumulate"),
    own(misplaced.Right, "dp2-tp2/4/fp32"),
    own(misplaced.RightContext, "dp2-cp2/4/fp32", "steps=2,recipe=accumulate"),
    "ddp/2/fp32/adamw/none/steps=2",
    "fsdp1/2/fp16-params/sgd/none/steps=2",
    "fsdp/2/fp16-reduce/sgd/none/model=text-tied,steps=2",
    "fsdp+tp/4/fp32/sgd/none/model=text,steps=2",
    "pp/2/fp32/sgd/none/model=text,steps=2",
    "ep/2/fp32/sgd/none/model=digits-experts,steps=2",
]


@pytest.mark.parametrize(
    "id",
    [*RIGHT, *(pytest.param(i, marks=pytest.mark.slow) for i in MORE_THAT_ARE_RIGHT)],
)
@pytest.mark.few(3)
def test_nothing_departs_in_a_right_stack(runner: Runner, id: str) -> None:
    found = located(runner, id)
    assert found.where == "nowhere", found.text
    assert found.compared > 10 * found.not_compared
    assert "all agree" in found.text
    assert (found.module, found.ranks, found.parameters) == ("", (), ())


def test_a_module_that_backward_does_not_reach_on_one_rank_is_named(
    runner: Runner,
) -> None:
    found = located(runner, own(misplaced.DetachedOnRank1, "dp2/2/fp32"))
    told = "all agree; but blocks.1.norm_1 has no gradient of its input on rank 1, and"
    assert told in found.text
    assert (found.where, found.ranks) == ("gradient", (0, 1)), found.text


@pytest.mark.parametrize(
    ("stack", "place", "where", "module", "ranks"),
    [
        (misplaced.NoGather, "tp2/2", "forward", "blocks.0.feed.down", (0, 1)),
        # the first token of rank 0 sees nobody else anyway
        (misplaced.NoAttentionGather, "tp2/2", "forward", "blocks.1.attention", (1,)),
        (misplaced.BiasOnEveryRank, "tp2/2", "forward", "blocks.0.feed.down", (0, 1)),
        (misplaced.NoSum, "tp2/2", "forward", "blocks.1.attention.out", (0, 1)),
        # rank 0's output is wrong, too: what is wrong on rank 1 is added to it
        (misplaced.MaskOnRank1, "tp2/2", "forward", "blocks.0.attention", (1,)),
        (misplaced.MaskOnRank1, "dp2/2", "forward", "blocks.0.attention", (1,)),
        (misplaced.NoSumInBackward, "tp2/2", "backward", "blocks.1.feed.up", (0, 1)),
        (misplaced.Multiplied, "tp2/2", "backward", "blocks.1.attention", (0, 1)),
        (misplaced.StageOff, "stages2/2", "forward", "blocks.1.norm_2", (1,)),
        (misplaced.OwnKeys, "cp2/2", "forward", "blocks.0.attention", (1,)),
        (misplaced.NormForgetsBackward, "dp2/2", "backward", "1", (0, 1)),
        (misplaced.NormOfOwnRows, "dp2/2", "forward", "1", (0, 1)),
        (misplaced.NormNotReduced, "tp2/2", "gradient", "blocks.0.norm_2", (0, 1)),
        (misplaced.NeverAveraged, "dp2/2", "gradient", "head", (0, 1)),
        (misplaced.SteppedTwice, "dp2/2", "update", "head", (0, 1)),
        (misplaced.EmbedIsOutOfReach, "dp2/2", "gradient", "embed", (0, 1)),
        # of stacks that step twice, one of each direction
        (misplaced.MaskOnRank1Twice, "dp2/2", "forward", "blocks.0.attention", (1,)),
        (
            misplaced.NoSumInBackwardTwice,
            "tp2/2",
            "backward",
            "blocks.1.feed.up",
            (0, 1),
        ),
        # what its gradient made of it shows in the second of the two steps
        (misplaced.NeverAveragedTwice, "dp2/2", "forward", "head", (0, 1)),
        (misplaced.SharperMakerOnRank1, "dp2/2", "forward", "maker.1", (1,)),
    ],
)
@pytest.mark.few(7)
def test_the_module_is_named(
    runner: Runner,
    stack: type,
    place: str,
    where: str,
    module: str,
    ranks: tuple[int, ...],
) -> None:
    found = located(runner, own(stack, f"{place}/fp32"))
    assert (found.where, found.module, found.ranks) == (where, module, ranks), (
        found.text
    )
    assert found.step == 0
    assert found.not_compared == 0
    assert found.parameters


def test_the_report_on_a_wrong_forward(runner: Runner) -> None:
    found = located(runner, own(misplaced.MaskOnRank1))
    assert found.text.startswith(
        "forward of blocks.0.attention on rank 1, step 0, micro-batch 0: what came in "
        "is right, the output differs by 0.0"
    )
    assert found.inside == "blocks.0.attention.out"
    assert "36 of 36 gradients" not in found.text  # those of the head's input are right
    below = located(runner, own(misplaced.NoSum))
    assert below.collective == "allreduce[16x6x8:float32] over ranks 0, 1"
    assert below.collective in below.text


def test_a_wrong_gradient_that_a_module_hands_on_is_that_of_the_outermost(
    runner: Runner,
) -> None:
    """The last module inside of the model gets the same wrong gradient."""
    found = located(runner, own(misplaced.OtherLossOnRank1, "dp2/2/fp32"))
    assert found.text.startswith(
        "backward of the model on rank 1, step 0, micro-batch 0: the gradient of its "
        "output differs by "
    )
    assert (found.module, found.inside, found.ranks) == ("", "", (1,))


def test_ranks_that_skip_alone_are_named(runner: Runner) -> None:
    scaler = "gradparity.fixtures.faulty:NeverAgrees"
    case = runner.run(
        scaler, Scenario.parse("fsdp/2/fp32/sgd/inf@r1s1:up.weight/steps=3")
    )
    found = runner.localise(case)
    assert found is not None and found.where == "update"
    assert ": rank 0 stepped, rank 1 did not" in found.text


def test_a_step_inside_of_a_step_is_reported(runner: Runner) -> None:
    found = located(runner, own(misplaced.NeverAveragedTwice, "dp2/2/fp32"))
    assert "micro-batch 1: what came in is right, the output differs" in found.text
    assert "an optimizer has stepped before it in this step" in found.text
    first = located(runner, own(misplaced.NoSumInBackwardTwice))
    assert "an optimizer has stepped" not in first.text


@pytest.mark.slow
def test_calls_without_their_like_on_one_rank_are_not_compared(runner: Runner) -> None:
    found = located(runner, own(misplaced.CalledOftener, "dp2/2/fp32"))
    assert found.where == "nowhere"
    assert "no activation could be compared on rank 0: its outermost modules were " in (
        found.text
    )
    assert "called [4] times, and [2] times on one rank" in found.text
    assert found.compared == 0 < found.not_compared


def test_a_narrower_dtype_than_that_of_the_precision_is_named(runner: Runner) -> None:
    found = located(runner, own(misplaced.ComputesInBf16, "dp2/2/fp32"))
    assert found.where == "forward"
    assert "it is in torch.bfloat16, and the precision is torch.float32: " in found.text
    right = located(runner, own(misplaced.BiasOnEveryRank))
    assert "and the precision is" not in right.text


def test_a_wrong_micro_batch_is_named(runner: Runner) -> None:
    found = located(
        runner, own(misplaced.SecondCallOff, "dp2/2/fp32", "steps=2,recipe=accumulate")
    )
    assert (found.module, found.micro_batch) == ("blocks.0.norm_1", 1)


def test_a_factor_of_all_gradients_is_reported(runner: Runner) -> None:
    found = located(runner, own(misplaced.AveragedTwice, "dp2/2/fp32"))
    assert found.where == "gradient"
    assert found.factor == pytest.approx(0.5)
    assert "all 36 gradients are 0.500 x the truth" in found.text
    assert "averaged once too often over dp (2 ranks)" in found.text


def test_a_factor_is_reported_for_a_stack_with_train_step(runner: Runner) -> None:
    found = located(runner, own(misplaced.ChunksAddedUp, "stages2/2/fp32"))
    assert found.where == "gradient"
    assert found.factor == pytest.approx(4.0)
    assert "all 36 gradients are 4.000 x the truth" in found.text


def test_a_workload_without_modules_is_checked_by_its_gradients(runner: Runner) -> None:
    found = located(runner, own(misplaced.HiddenSummed, "dp2/2/fp32"))
    assert (found.where, found.compared) == ("gradient", 0)
    assert "all 36 gradients are 2.000 x the truth" in found.text
    assert "added up where they are to be averaged over dp (2 ranks)" in found.text
    assert "the stack shows no modules" in found.text


def test_a_factor_of_the_updates_is_reported(runner: Runner) -> None:
    found = located(runner, own(misplaced.SteppedTwice, "dp2/2/fp32"))
    assert found.module == "head"
    assert found.factor == pytest.approx(2.0, rel=1e-3)
    assert "the update of head.weight is 2.000 x the truth" in found.text


def test_a_loss_that_each_rank_normalises_by_itself_is_reported(runner: Runner) -> None:
    found = located(runner, own(misplaced.OwnCount, "cp2/2/fp32"))
    assert found.where in ("loss", "backward")
    assert found.module == ""


@pytest.mark.parametrize("state", ["right", "wrong"])
def test_only_multiples_of_the_right_gradient_are_normalised_by_a_rank(
    state: str,
) -> None:
    start = Boundary(0, "", 0, OUTPUT_GRADIENT, 0)
    of = object.__new__(Boundaries)
    of.step, of.one_factor = 0, True
    of.ranks = dict.fromkeys((0, 1))  # type: ignore[assignment]
    seen: Any = _Found(state, error=0.1, bound=1.0)  # type: ignore[arg-type]
    of.found = {(0, start): seen, (1, start): seen}
    for other, words in (
        ((1, 0), "each rank (1 on rank 0, 0.9 on rank 1, step 0, micro-batch 0)"),
        ((0, 1), "each micro-batch (1 in 0, 0.9 in 1, step 0, rank 0)"),
    ):
        of.factors = {(0, 0): 1.0, other: 0.9}
        of.starts = dict.fromkeys(of.factors, start)
        uneven = of.uneven()
        assert (uneven is not None) == (state == "right")
        assert uneven is None or words in uneven.text


def test_a_factor_of_the_loss_is_reported(runner: Runner) -> None:
    found = located(runner, own(misplaced.LossOfBothRanks))
    assert found.where == "loss"
    assert found.factor == pytest.approx(2.0)
    assert "gradients are 2.000 x the truth" in found.text


@pytest.mark.parametrize(
    ("stack", "place", "words"),
    [
        (misplaced.NormNotReduced, "tp2/2", "each rank has a part of the sum"),
        (misplaced.NeverAveraged, "dp2/2", "each rank has that of its own rows"),
        (misplaced.NoSumInBackward, "tp2/2", "is a partial sum that nothing adds up"),
        (misplaced.SteppedTwice, "dp2/2", "of step 0 that were compared are right"),
        (misplaced.EmbedIsOutOfReach, "dp2/2", "no rank has a gradient of embed."),
        (misplaced.ZeroOnOneRank, "dp2/2", ": it is 0 on rank 1"),
    ],
)
def test_the_kind_of_fault_is_reported(
    runner: Runner, stack: type, place: str, words: str
) -> None:
    assert words in located(runner, own(stack, f"{place}/fp32")).text


@pytest.mark.slow
def test_tokens_may_be_strided_over_ranks(runner: Runner) -> None:
    right = located(runner, own(misplaced.StridedContext, "cp2/2/fp32"))
    assert right.where == "nowhere", right.text
    wrong = located(runner, own(misplaced.StridedAndOneIsItsOwn, "cp2/2/fp32"))
    assert (wrong.where, wrong.module) == ("gradient", "blocks.1.norm_1"), wrong.text


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.5, "0.500"),
        (1.00004, "1.0000400"),
        (1 - 2.0**-20, "0.999999046"),
        (2.0**-16, "1/65536"),
        (0.0012345, "0.00123"),
        (-3.0, "-3.000"),
    ],
)
def test_a_factor_has_the_digits_that_tell_it_from_1_and_from_0(
    factor: float, words: str
) -> None:
    assert _times(factor) == f"{words} x the truth"


def test_an_update_without_a_gradient_is_no_fault_of_the_optimizer(
    runner: Runner,
) -> None:
    found = located(runner, own(misplaced.MovesAFrozenBias, "dp2/2/fp32"))
    assert (found.where, found.module) == ("update", "head")
    assert "no gradient is due there: look at what else moves it" in found.text


def test_a_factor_on_one_rank_is_no_missing_average(runner: Runner) -> None:
    found = located(runner, own(misplaced.SlightlyMoreOnRank1, "dp2/2/fp32"))
    assert "head.bias itself differs on rank 1, step 0, by 0.001" in found.text
    assert "nothing averages them" not in found.text


class NeverAverages(misplaced.Right):
    """Gradients are not averaged at all."""

    meshes = ({"dp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return model


def test_a_missing_average_is_named_though_ranks_clip(runner: Runner) -> None:
    model = f"{__name__}:{NeverAverages.__name__}"
    id = f"dp2/2/fp32/own/none/model={model},steps=1,recipe=clip-norm"
    found = located(runner, id)
    # gradparity's own loop clips all parts by one norm
    assert "each rank has its own part; nothing reduces them before" in found.text
    whole = np.arange(1.0, 7.0)
    part = whole**2
    assert is_sum_of([0.1 * part, 3.0 * (whole - part)], whole, 1e-3)
    assert not is_sum_of([part, 2.0 * part], whole, 1e-3)
    assert not is_sum_of([0.1 * part, part - whole], whole, 1e-3)  # one is subtracted
    assert not is_sum_of([part[:3], whole[:3]], whole[::-2], 1e-3)  # fits anything


class ZeroesOnce(Trains):
    """Only the first step zeroes the gradients."""

    def train_step(self, stack: Engine, micro_batches: Any, scaler: Any) -> Any:
        if stack.kept:
            stack.optimizer.zero_grad = lambda *_: None  # type: ignore[method-assign]
        stack.kept["stepped"] = True
        return super().train_step(stack, micro_batches, scaler)


def test_gradients_of_the_last_step_are_recognised(runner: Runner) -> None:
    model = f"{__name__}:{ZeroesOnce.__name__}"
    found = located(runner, f"dp2/2/fp32/own/none/model={model},steps=2")
    assert "still contain the gradients of step 0: zero_grad() is missing" in found.text
    assert "one rank" not in found.text


class AveragesInStep(torch.optim.SGD):
    """Averages gradients over ranks inside its step."""

    def step(self, closure: Any = None) -> Any:
        if dist.is_initialized():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
        return super().step(closure)


class AveragesLate(NeverAverages):
    """The optimizer averages, after gradparity has read the gradients."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return AveragesInStep([p for _, p in parameters], lr=0.1)


def test_an_optimizer_that_averages_inside_its_step_is_recognised(
    runner: Runner,
) -> None:
    model = f"{__name__}:{AveragesLate.__name__}"
    found = located(runner, f"dp2/2/fp32/own/none/model={model},steps=1")
    assert "updates are right, so step does it, after any clip" in found.text
    model = f"{__name__}:{NeverAverages.__name__}"
    found = located(runner, f"dp2/2/fp32/own/none/model={model},steps=1")
    assert "nothing averages them" in found.text
    assert "updates are right" not in found.text


def test_errors_of_a_common_factor_are_no_rounding(runner: Runner) -> None:
    found = located(runner, own(misplaced.SlightlyTooMuch, "dp2/2/fp32"))
    assert found.where == "gradient" and "1.01000 x the truth" in found.text
    assert "reduce_dtype" not in found.text


class RoundsGradients(Trains):
    """Gradients are rounded to bf16 before the clip, also on one rank."""

    def clip(self, stack: Engine) -> Tensor:
        for parameter in stack.module.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.bfloat16().float()
        return super().clip(stack)


@pytest.mark.parametrize("place", ["dp1/1", "dp2/2"])
def test_sums_in_16_bits_need_a_line_and_no_other_reference(
    runner: Runner, place: str
) -> None:
    model = f"{__name__}:{RoundsGradients.__name__}"
    found = located(runner, f"{place}/fp32/own/none/model={model},steps=1")
    assert "declare it by reduce_dtype" in found.text
    assert "one rank" not in found.text


class Unfreezes(misplaced.Right):
    """The model freezes a layer, and the layout trains it."""

    meshes = ({"dp": 2},)

    def model(self) -> nn.Module:
        model = super().model()
        model.get_parameter("head.bias").requires_grad_(False)
        return model

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model.get_parameter("head.bias").requires_grad_(True)
        return super().parallelize(model, mesh)


def test_a_gradient_that_is_not_expected_is_reported(runner: Runner) -> None:
    model = f"{__name__}:{Unfreezes.__name__}"
    found = located(runner, f"dp2/2/fp32/own/none/model={model},steps=1")
    assert "no gradient of head.bias is due: the model freezes it" in found.text


def test_a_rank_that_clips_by_its_own_norm_is_named(runner: Runner) -> None:
    # regression: N27
    stack = "gradparity.fixtures.faulty.stacks:ClipsByTheNormOfItsShards"
    found = located(runner, f"dp2/2/fp32/own/none/model={stack},steps=2")
    assert ", the norm of its own part" in found.text
    assert "reduce_dtype" not in found.text
    assert "one rank" not in found.text


def test_a_scaler_that_is_wrong_on_a_right_stack(runner: Runner) -> None:
    id = "fsdp/2/fp32/sgd/none/steps=2"
    found = located(runner, id, TWICE)
    assert found.where == "gradient"
    assert found.factor is not None and "x the truth" in found.text
    assert located(runner, id).where == "nowhere"


def test_a_later_step_and_a_second_world_are_found(runner: Runner) -> None:
    found = located(runner, own(misplaced.WrongAtStep2, "dp2/2/fp32", "steps=4"))
    assert (found.where, found.step, found.module) == ("forward", 2, "blocks.1.norm_2")


def test_a_run_says_where_in_terminal_report_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    id = own(misplaced.BiasOnEveryRank)
    code = main(["run", "--scaler", "none", "--scenario", id, "--out", str(tmp_path)])
    assert code == 1
    report = read_report(tmp_path / "report.jsonl")
    (case,) = report.cases
    assert case.location is not None
    assert case.location.module == "blocks.0.feed.down"
    text = case.location.text
    assert text in capsys.readouterr().out
    assert text in render_page(report)
    console = Console(record=True, width=100)
    print_report(console, report)
    assert "blocks.0.feed.down" in console.export_text()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["localise", own(misplaced.NoSum)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("forward of blocks.1.attention.out on ranks 0, 1, step 0")
    assert "  differs: embed.weight\n" in out
    assert main(["localise", "single/1/fp32/sgd/none/steps=2"]) == 0
    assert capsys.readouterr().out.startswith("nothing differs at step 0")
    assert main(["localise", "pp/2/fp32/sgd/inf@r0s0:first/steps=2"]) == 2
    assert "cannot be trained without a scaler" in capsys.readouterr().err


def test_the_verdict_and_not_the_place_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With batch statistics no activation can be compared; the exit code stays 4."""
    stack = "model=gradparity.tests.workloads.stacks:BatchStatistics,steps=2"
    id = f"dp2/2/fp32/own/none/{stack}"
    # the checks before a run refuse a loss that is no mean over rows
    monkeypatch.setattr(RunSettings, "chosen", lambda *_: [Scenario.parse(id)])
    assert main(["localise", id]) == 4
    out = capsys.readouterr().out
    assert "no activation could be compared: a layer looks at all rows at once" in out
    assert "what came in is right" not in out


def test_what_is_not_compared_is_not_called_right(runner: Runner) -> None:
    found = located(runner, own(misplaced.WrongTokens, "dp2/2/fp32"))
    assert (found.where, found.module) == ("forward", "embed")
    assert "what came in could not be compared, the output differs" in found.text


def test_the_gradient_that_departs_most_is_named(runner: Runner) -> None:
    """Clipping spreads a fault over all gradients, but one differs most."""
    found = located(runner, own(misplaced.ClippedAfterAFault, "dp2/2/fp32"))
    assert found.parameters[0] == "embed.weight"
    assert (found.where, found.module) == ("gradient", "embed")
    assert "the gradient of embed.weight itself differs" in found.text
    assert "x the truth, as if clipped by a norm that contains it" in found.text


@pytest.mark.parametrize("recipe", ["accumulate", "accumulate-uneven"])
@pytest.mark.slow
def test_a_gradient_of_the_last_pass_only_is_recognised(
    runner: Runner, recipe: str
) -> None:
    more = f"steps=2,recipe={recipe}"
    found = located(runner, own(misplaced.KeepsTheLastPass, "dp2/2/fp32", more))
    assert found.where == "gradient"
    told = "all 36 gradients come from the last micro-batch alone, of the "
    assert found.text.startswith(told)
    assert found.module == ""
    wrong = located(runner, own(misplaced.NeverAveraged, "dp2/2/fp32", more))
    assert "alone" not in wrong.text


def test_a_gradient_of_the_rows_of_one_rank_is_recognised(runner: Runner) -> None:
    found = located(runner, own(misplaced.TakesOneRanksGradients, "dp2/2/fp32"))
    told = "all 36 gradients come from the rows of rank 1 alone; "
    assert found.where == "gradient" and found.text.startswith(told)


def test_a_model_with_frozen_parts_is_no_first_case(runner: Runner) -> None:
    told = "run the scenario without recipe=frozen first"
    more = "steps=2,recipe=frozen"
    found = located(runner, own(misplaced.AveragedTwice, "dp2/2/fp32", more))
    assert found.where == "gradient" and told in found.text
    found = located(runner, own(misplaced.AveragedTwice, "dp2/2/fp32"))
    assert told not in found.text


def test_a_share_of_the_loss_is_recognised(runner: Runner) -> None:
    found = located(runner, own(misplaced.ReturnsItsShare, "dp2/2/fp32"))
    assert found.where == "loss" and found.factor == pytest.approx(0.5)
    assert "it is 0.500 x the truth: a share of it" in found.text
    found = located(runner, own(misplaced.ReturnsWhatBackwardStartsFrom, "dp2/2/fp32"))
    # regression: O6, the factor was that of a mean without weights
    assert found.where == "loss" and found.factor != pytest.approx(1.0)
    assert "from which backward starts, and not a mean" in found.text


def test_a_run_localises_once_for_a_topology_and_recipe() -> None:
    with Runner(folder=".", timeout_s=60, localises=1) as runner:
        wrong = own(misplaced.BiasOnEveryRank)
        first = runner.run("none", Scenario.parse(wrong))
        again = runner.run("none", Scenario.parse(f"{wrong},seed=1"))
        other = runner.run(
            "none", Scenario.parse(own(misplaced.AveragedTwice, "dp2/2/fp32"))
        )
    assert first.status == again.status == other.status == "fail"
    assert first.location is not None
    assert again.location is other.location is None


def test_a_second_run_that_breaks_changes_no_verdict(runner: Runner) -> None:
    case = runner.run("none", Scenario.parse(own(misplaced.BreaksIfWatched)))
    assert case.status == "fail"
    found = runner.localise(case)
    assert found is not None and found.where == "unknown"
    assert "it does not like to be watched" in found.text


# - Names of modules


def test_what_is_not_finite_is_no_multiple() -> None:
    right = np.ones(3)
    pairs = [multiple_of(2 * right, right), multiple_of(np.full(3, np.nan), right)]
    assert _common(pairs[:1], 1e-3) == 2.0
    assert _common(pairs, 1e-3) is None


def test_a_stage_that_counts_its_layers_anew_goes_by_its_parameters() -> None:
    layers = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4)]
    model, stage = nn.Sequential(*layers), nn.Sequential(*layers[2:])
    parameters = {n: p for n, p in model.named_parameters() if n[0] in "23"}
    names = names_of(stage, module_names(model), parameters)
    assert names == {
        layers[2]: "2",
        layers[2][0]: "2.0",
        layers[3]: "3",
        layers[3][0]: "3.0",
    }
    assert all(is_whole(module, name, model) for module, name in names.items())


def test_a_wrapper_and_a_part_are_not_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    wrapper = nn.Module()
    wrapper.module = model
    names = names_of(wrapper, module_names(model), dict(model.named_parameters()))
    assert names == {model: "", model[0]: "0", model[1]: "1"}
    part = nn.Sequential(model[0])
    assert not is_whole(part, "", model)
    assert is_whole(model[0], "0", model)


def test_the_gradients_of_several_backwards_through_one_graph_add_up() -> None:
    """An actor and a critic share an encoder and have separate backwards."""
    model = nn.Linear(2, 2)
    with watch_modules([model], {model: ""}) as log:
        output = model(torch.ones(3, 2))
        output.sum().backward(retain_graph=True)
        (2 * output).sum().backward()
    seen = log.passed[Boundary(0, "", 0, OUTPUT_GRADIENT, 0)]
    assert (seen.values == 3).all()


def test_a_tensor_that_a_module_gets_twice_stays_one() -> None:
    """Attention packs its projections if its three inputs are one tensor."""
    model = nn.MultiheadAttention(4, 2)
    x = torch.ones(3, 1, 4, requires_grad=True)
    same = list[bool]()
    model.register_forward_pre_hook(lambda _, args: same.append(args[0] is args[1]))
    with watch_modules([model], {model: ""}) as log:
        model.register_forward_pre_hook(lambda _, args: same.append(args[0] is args[2]))
        model(x, x, x)[0].sum().backward()
    assert same == [True, True]
    inputs = [b.slot for b in log.passed if b.kind == INPUT]
    assert inputs == [0]
