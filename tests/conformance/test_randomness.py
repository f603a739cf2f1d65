"""Random layers: draws are compared with the layers on, and gradients with them off."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradparity.conformance import Case, Evidence, Runner, Scenario
from gradparity.conformance.rank.randomness import DrawLog
from gradparity.conformance.rank.trace import Draw
from gradparity.conformance.script.standalone import standalone_script
from gradparity.conformance.space.catalogue import Selection, select
from gradparity.conformance.space.facts import facts_of
from gradparity.conformance.space.random_layers import turn_off_random_layers
from gradparity.conformance.space.workload_checks import check_workload
from gradparity.conformance.status import UsageError
from gradparity.fixtures import WorkloadError
from gradparity.tests.made_up import finding, rank_trace
from gradparity.tests.workloads import random_stacks as stacks

MODULE = "gradparity.tests.workloads.random_stacks"
PLAIN_MODULE = "gradparity.tests.workloads.stacks"


def scenario(stack: type, place: str, recipe: str = "random") -> Scenario:
    text = f"{place}/own/none/model={MODULE}:{stack.__name__},steps=2,recipe={recipe}"
    return Scenario.parse(text)


# - Stacks


def statuses(case: Case) -> dict[str, str]:
    assert not case.problem, case.problem
    return {v.law: v.status for v in case.verdicts}


@pytest.mark.parametrize(
    ("stack", "place", "compared"),
    [
        (stacks.Dropout, "single/1/fp32", {"data", "size"}),
        (stacks.Dropout, "dp2/2/fp32", {"data", "size"}),
        (stacks.Dropout, "dp2/2/bf16-autocast", {"data", "size"}),
        (stacks.Dropout, "tp2/2/fp32", {"data", "replicas", "size"}),
        (stacks.Dropout, "dp2-tp2/4/fp32", {"data", "replicas", "size"}),
        (stacks.SequenceParallel, "tp2/2/fp32", {"data", "size"}),
        (stacks.DropsDTensors, "tp2/2/fp32", {"data", "replicas", "size"}),
        (stacks.Recomputes, "dp2/2/fp32", {"data", "recompute", "size"}),
        (stacks.RecomputesReentrant, "dp2/2/fp32", {"data", "recompute", "size"}),
        (stacks.RestoresItsOwnGenerator, "dp2/2/fp32", {"data"}),
        (stacks.NoisyAttention, "dp2/2/fp32", {"data"}),
        (stacks.SeedsInBatch, "dp2/2/fp32", {"data", "size"}),
        (stacks.OwnStep, "dp2/2/fp32", {"data", "size"}),
        (stacks.ReplacesItsDropout, "dp2/2/fp32", {"data", "size"}),
        (stacks.ReplacesItsDropout, "dp2/2/bf16-autocast", {"data", "size"}),
        (stacks.EvaluatesAndGoesOn, "dp2/2/fp32", {"data", "size"}),
        (stacks.Stages, "pp2/2/fp32", {"data", "size"}),
    ],
)
@pytest.mark.few(5)
def test_a_right_stack_passes_with_its_random_layers_on_and_off(
    runner: Runner, stack: type, place: str, compared: set[str]
) -> None:
    told = statuses(runner.run("none", scenario(stack, place)))
    passed = {law for law, status in told.items() if status == "pass"}
    chapter = {law for law in passed if law.startswith("random.")}
    assert chapter == {f"random.{name}" for name in compared}
    assert not {"fail", "inconclusive"} & {*told.values()}
    # nobody can take the one run for the other
    assert not any(law.startswith("parity") for law in passed)
    off = statuses(runner.run("none", scenario(stack, place, "plain")))
    passed = {law for law, status in off.items() if status == "pass"}
    assert {"parity.gradient", "parity.update", "parity.loss"} <= passed
    assert not any(law.startswith("random") for law in passed)


@pytest.mark.parametrize(
    ("stack", "place", "law", "words"),
    [
        # regression: P8
        (
            stacks.ForgetsTheFactor,
            "dp2/2/fp32",
            "size",
            "step 0: _LeavesOut 3: rank 0 multiplies what it keeps by 1, and with the "
            "model's p = 0.4 that is 1 / (1 - p) = 1.667",
        ),
        (stacks.DropsMore, "dp2/2/bf16-autocast", "size", "what it keeps by 2, and"),
        (stacks.ChangesTheProbability, "tp2/2/fp32", "size", "keeps by 1.111, and"),
        (
            stacks.ReplicasDrawApart,
            "tp2/2/fp32",
            "replicas",
            "step 0: Dropout 3: applied to one activation, rank 1 drew other numbers "
            "than rank 0",
        ),
        (
            stacks.SeedsAlike,
            "dp2/2/fp32",
            "data",
            "rank 1 drew the numbers that rank 0 drew at step 0, for other data",
        ),
        (
            stacks.SeedsEachForward,
            "dp2/2/fp32",
            "data",
            "step 1: Dropout 3: rank 0 drew the numbers that rank 0 drew at step 0",
        ),
        (
            stacks.ForgetsTheGenerator,
            "dp2/2/fp32",
            "recompute",
            "step 0: Dropout rest.3: drawn anew in backward",
        ),
        (
            stacks.ForgetsTheGeneratorReentrant,
            "dp2/2/fp32",
            "recompute",
            "drawn anew in backward on rank 0",
        ),
        (
            stacks.EvaluatesOnOneRank,
            "dp2/2/fp32",
            "size",
            "step 1: Dropout 3: rank 0 multiplies what it keeps by 1, and with the "
            "model's p = 0.4 that is 1 / (1 - p) = 1.667. It drops nothing: is it in "
            "eval mode there?",
        ),
        (
            stacks.SecondStageDropsMore,
            "pp2/2/fp32",
            "size",
            "step 0: Dropout 4: rank 1 multiplies what it keeps by 1.667, and with the "
            "model's p = 0.2",
        ),
        (
            stacks.SeedsEachStep,
            "dp2/2/fp32",
            "data",
            "rank 0 drew the numbers that rank 0 drew at step 0",
        ),
        (
            stacks.SeedsEachPass,
            "dp2/2/fp32",
            "data",
            "step 0: Dropout 3: rank 0 drew the numbers that rank 0 drew at step 0",
        ),
    ],
)
def test_a_wrong_workload_fails_its_check_and_no_other_of_the_chapter(
    runner: Runner, stack: type, place: str, law: str, words: str
) -> None:
    case = runner.run("none", scenario(stack, place))
    told = {v.law: v.message for v in case.verdicts if v.status == "fail"}
    assert {n for n in told if n.startswith("random")} == {f"random.{law}"}
    assert words in told[f"random.{law}"]
    # what is drawn has no effect on a run without random layers
    assert runner.run("none", scenario(stack, place, "plain")).status == "pass"


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (stacks.SavesItsGenerator, ""),
        (
            stacks.ForgetsItsGenerator,
            "step 2: Dropout 3: rank 0 drew the numbers that rank 0 drew at step 0, "
            "for other data: have the checkpoint, which was loaded before step 2, hold "
            "the states of each rank's generators",
        ),
        (stacks.SavesOneGenerator, "rank 1 drew the numbers that rank 0 drew at step"),
    ],
)
def test_numbers_after_a_checkpoint_are_not_those_before_it(
    runner: Runner, stack: type, words: str
) -> None:
    text = f"dp2/2/fp32/own/none/model={MODULE}:{stack.__name__},steps=4"
    case = runner.run("none", Scenario.parse(f"{text},recipe=random-resume"))
    assert case.status == ("fail" if words else "pass"), case.problem
    told = next(v for v in case.verdicts if v.law == "random.data")
    assert words in told.message


def test_only_a_checkpoint_of_its_own_is_loaded_with_random_layers_on() -> None:
    for name in ("OwnStep", "Dropout"):
        text = f"dp2/2/fp32/own/none/model={MODULE}:{name},recipe=random-resume"
        with pytest.raises(UsageError, match="save_checkpoint and load_checkpoint"):
            Scenario.parse(text)
    chosen = select(
        "quick", Selection(workload=f"{MODULE}:SavesItsGenerator", no_scaler=True)
    )
    assert "random-resume" in {s.recipe for s in chosen}


def test_a_scaler_is_checked_with_random_layers_on(runner: Runner) -> None:
    """The run without a scaler draws the same numbers, so results must be equal."""
    ours = "gradparity.scaler:GradScaler"
    told = statuses(runner.run(ours, scenario(stacks.Dropout, "dp2/2/fp32")))
    assert told["transparency.gradient"] == told["random.data"] == "pass"


def test_random_layers_that_cannot_be_turned_off_are_no_violation(
    runner: Runner,
) -> None:
    case = runner.run("none", scenario(stacks.DropsInAHook, "dp2/2/fp32", "plain"))
    told = {v.law: v for v in case.verdicts}
    assert case.status == told["parity.gradient"].status == "inconclusive"
    assert "ranks 0, 1 drew random numbers" in told["parity.gradient"].message


def test_the_recipe_needs_random_layers() -> None:
    text = f"dp2/2/fp32/own/none/model={PLAIN_MODULE}:Right,recipe=random"
    with pytest.raises(UsageError, match=r"Right has no random layers"):
        Scenario.parse(text)
    with pytest.raises(UsageError, match="recipe 'random': it tests a user's training"):
        Scenario.parse("ddp/2/fp32/sgd/none/recipe=random")


@pytest.mark.parametrize("preset", ["parity", "quick", "default"])
def test_presets_try_every_layout_with_random_layers_on(preset: str) -> None:
    chosen = select(preset, Selection(workload=f"{MODULE}:Dropout", no_scaler=True))
    on = {s.topology for s in chosen if s.recipe == "random"}
    assert on >= {"single", "dp2", "tp2", "dp2-tp2"}
    other = select(preset, Selection(workload=f"{PLAIN_MODULE}:Right", no_scaler=True))
    assert "random" not in {s.recipe for s in other}


def test_draws_that_no_module_shows_in_backward_are_reported(runner: Runner) -> None:
    """The checkpointed function is a method that draws from its own generator."""
    case = runner.run("none", scenario(stacks.ForgetsItsOwnGenerator, "dp2/2/fp32"))
    (told,) = (v for v in case.verdicts if v.law == "random.recompute")
    assert told.status == "skipped" and told.not_compared == 4  # 2 ranks x 2 steps
    assert told.message.startswith("no draw was seen in a forward that ran again")
    assert "4 draws could not be: they are in modules with parameters" in told.message


def test_no_script_is_made_that_would_compare_random_numbers() -> None:
    with pytest.raises(UsageError, match="random layers"):
        standalone_script(scenario(stacks.Dropout, "dp2/2/fp32", "plain"), "none")


# - What is noted of a draw

ROWS, WIDTH = 8, 32


def activation(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator)


def draws(layer: nn.Module, x: Tensor | None = None) -> list[Draw]:
    with DrawLog(layer) as log:
        layer(activation() if x is None else x)
    return log.draws


class Layer(nn.Module):
    def __init__(self, forward: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.call = forward

    def forward(self, x: Tensor) -> Any:
        return self.call(x)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.4),
        nn.Dropout(0.4, inplace=True),
        nn.Sequential(nn.Dropout(0.4)),
        Layer(lambda x: x * (torch.rand(x.shape) > 0.4) / 0.6),
        Layer(lambda x: x.masked_fill(torch.rand_like(x) > 0.4, 0.0)),
    ],
)
def test_states_and_what_they_are_applied_to_are_known(layer: nn.Module) -> None:
    torch.manual_seed(1)
    (one,) = draws(layer)
    torch.manual_seed(1)
    (again,) = draws(layer)
    (other,) = draws(layer)
    torch.manual_seed(1)
    (elsewhere,) = draws(layer, activation(5))
    assert one.applied and one.varied and one.by_row and not one.recomputed
    assert (again.state, again.applied) == (one.state, one.applied)
    assert other.applied == one.applied and other.state != one.state
    assert elsewhere.applied != one.applied and elsewhere.state == one.state


def test_features_that_are_dropped_whole_are_drawn_by_row() -> None:
    layer = Layer(lambda x: nn.functional.dropout1d(x, 0.5))
    (seen,) = draws(layer, activation().view(ROWS, 4, 8))
    assert seen.by_row and seen.applied


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x * (torch.rand(()) > 0.1),  # the whole layer, for all rows
        lambda x: x @ torch.randn(WIDTH, 100),
        lambda x: x * torch.randint(0, 2, (WIDTH,)),
    ],
)
def test_numbers_that_all_rows_share_are_no_noise(
    forward: Callable[[Tensor], Tensor],
) -> None:
    (seen,) = draws(Layer(forward))
    assert seen.applied and not seen.by_row


def test_what_a_module_with_parameters_applies_its_numbers_to_is_not_known() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.4)

    (seen,) = draws(Noisy(WIDTH, WIDTH))
    assert seen.state and not seen.applied and not seen.by_row


@pytest.mark.parametrize("x", [torch.zeros(8, 8), torch.ones(8, 8)])
def test_activations_that_do_not_vary_are_recognised(x: Tensor) -> None:
    (seen,) = draws(nn.Dropout(0.5), x)
    assert seen.applied and not seen.varied


def test_draws_in_backward_hooks_are_left_out() -> None:
    """Draws in backward hooks, such as noise on gradients, are not logged."""
    noise, x = nn.Dropout(0.5), activation().requires_grad_()
    x.register_hook(noise)
    with DrawLog(noise) as log:
        (x * x).sum().backward()
    assert log.draws == [] and log.outside == 0


def test_draws_in_no_call_are_counted_and_a_state_that_is_restored_is_none() -> None:
    with DrawLog(nn.Dropout()) as log:
        torch.rand(1)
    assert log.outside == 1
    with DrawLog(nn.Dropout()) as log, torch.random.fork_rng(devices=[]):
        log._look()
    assert log.outside == 0


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.source)


def test_a_generator_of_a_module_is_seen_beside_torchs() -> None:
    layer, states = OwnGenerator(), []
    for seed in (0, 1):  # of torch's, which it does not use
        torch.manual_seed(seed)
        layer.source.manual_seed(5)
        (seen,) = draws(layer)
        states.append(seen.state)
    assert states[0] == states[1]


def test_a_generator_that_a_call_has_made_begins_with_its_seed() -> None:
    class MakesItsOwn(OwnGenerator):
        source: Any

        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(self.source, torch.Generator):
                self.source = torch.Generator().manual_seed(5)
            return super().forward(x)

    late, early = MakesItsOwn(), OwnGenerator()
    late.source = None
    early.source.manual_seed(5)
    ((first,), (other,)) = draws(late), draws(early)
    (second,) = draws(late)
    # torch's generator is not used, so both logs hold one state
    assert first.state == other.state != second.state


def test_modules_are_named_as_they_are_called_and_hooks_end_with_the_log() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nn.functional.dropout(x)
            raise RuntimeError("no")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Dropout(), Fails()])

        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(RuntimeError):
                self.blocks[1](x)
            return nn.functional.dropout(self.blocks[0](x))

    outer = Outer()
    assert [d.module for d in draws(outer)] == ["blocks.1", "blocks.0", ""]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in outer.modules())


def test_random_layers_are_turned_off_wherever_the_modules_are() -> None:
    class Engine:
        def __init__(self) -> None:
            self.module = nn.ModuleDict(
                {
                    "drop": nn.Dropout(0.3),
                    "attention": nn.MultiheadAttention(4, 2, dropout=0.5),
                    "rnn": nn.GRU(4, 4, num_layers=2, dropout=0.5),
                    "linear": nn.Linear(4, 4),
                }
            )
            setattr(self.module, "jitter_noise", 0.1)  # noqa: B010  # no tensor
            setattr(self.module, "dropped", 3)  # noqa: B010

    engine = Engine()
    turn_off_random_layers(engine)
    parts: Any = engine.module
    assert parts["drop"].p == parts["attention"].dropout == parts["rnn"].dropout == 0.0
    assert (parts.jitter_noise, parts.dropped) == (0.0, 3)


def test_layers_left_out_by_an_attribute_of_the_class_are_kept() -> None:
    check_workload(f"{MODULE}:DropsLayers")
    # of the model that was made, not of the class: with recipe=random it is on again
    assert stacks.Blocks.layerdrop == 0.5
    assert facts_of(f"{MODULE}:DropsLayers").draws


def test_a_forward_that_stays_random_says_where() -> None:
    torch.manual_seed(0)  # one forward in 64 is like the one before
    with pytest.raises(WorkloadError) as refused:
        check_workload(f"{MODULE}:DropsByConfig")
    told = str(refused.value)
    assert "One forward calls blocks." in told and "in its place" in told
    assert "not in a config" in told
    with pytest.raises(WorkloadError, match=r"1 \(Noise\) is the first whose output"):
        check_workload(f"{MODULE}:AlwaysRandom")


# - Laws on made-up draws


DROPOUT: dict[str, Any] = {
    "module": "drop",
    "layer": "Dropout",
    "varied": True,
    "by_row": True,
}


def made_up(*ranks: dict[str, Any], place: str = "dp2-tp2/4/fp32") -> Evidence:
    """Return evidence of four ranks with one draw per step; ``ranks`` change it."""
    traces = []
    for number, change in enumerate(ranks):
        trace = rank_trace(number, bad=False)
        trace.coordinate = {"dp": number // 2, "tp": number % 2}
        for seen in trace.steps:
            data = f"data {number // 2} at {seen.step}"
            settings = DROPOUT | {"state": f"state for {data}", "applied": data}
            seen.draws = [Draw(**(settings | change))]
        traces.append(trace)
    return Evidence(scenario=scenario(stacks.Dropout, place), ranks=tuple(traces))


RIGHT: dict[str, Any] = {}


def test_made_up_right_draws_pass() -> None:
    of = made_up(RIGHT, RIGHT, RIGHT, RIGHT)
    assert finding(of, "random.replicas").compared == 8  # two pairs, four steps
    assert finding(of, "random.data").status == "pass"
    assert finding(of, "random.recompute").status == "skipped"


@pytest.mark.parametrize(
    ("change", "law"),
    [
        ({"state": "another"}, "random.replicas"),
        # a mask in another module is another mask
        ({"state": "another", "module": "else"}, None),
        ({"state": "another", "applied": "another part"}, None),
        ({"state": "another", "varied": False}, None),
    ],
)
def test_random_replicas_fails_if_replicas_draw_differently(
    change: dict[str, Any], law: str | None
) -> None:
    of = made_up(RIGHT, RIGHT, RIGHT, change)
    status = finding(of, "random.replicas").status
    assert status == ("fail" if law else "pass")
    if law:
        assert finding(of, law).ranks == (3,)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, "fail"),
        ({"by_row": False}, "pass"),
        ({"applied": ""}, "pass"),
        # equal data, such as a weight, may have equal noise on all ranks
        ({"applied": "weight"}, "pass"),
        ({"module": "else"}, "pass"),
    ],
)
def test_random_data_fails_if_different_rows_draw_alike(
    change: dict[str, Any], status: str
) -> None:
    ranks = [{**RIGHT}, {**RIGHT}, {**change}, {**change}]
    of = made_up(*ranks)
    for trace, twin in zip(of.ranks[2:], of.ranks[:2], strict=True):
        for seen, other in zip(trace.steps, twin.steps, strict=True):
            seen.draws[0].state = other.draws[0].state
            if change.get("applied") == "weight":
                other.draws[0].applied = "weight"
    found = finding(of, "random.data")
    assert found.status == status
    assert found.ranks == ((2,) if status == "fail" else ())


def test_ranks_that_see_the_same_data_may_draw_alike_for_parts_of_it() -> None:
    """Without a generator of DTensor, shards of one tensor get equal masks."""
    ranks = [{"state": "one"}, {"state": "one"}, {}, {}]
    of = made_up(*ranks)
    for trace in of.ranks[:2]:
        del trace.steps[1:]
        trace.steps[0].draws[0].applied = f"part of rank {trace.rank}"
    assert finding(of, "random.data").status == "pass"


def recomputed(state: str, applied: str) -> Evidence:
    of = made_up(RIGHT)
    for seen in of.ranks[0].steps:
        seen.draws = [
            Draw(module="drop", layer="Dropout", state="n1", applied="first"),
            Draw(module="drop", layer="Dropout", state="n2", applied="second"),
            Draw(
                module="drop",
                layer="Dropout",
                state=state,
                applied=applied,
                recomputed=True,
            ),
        ]
    return of


@pytest.mark.parametrize(
    ("state", "applied", "status"),
    [
        ("n1", "first", "pass"),
        ("n2", "second", "pass"),
        ("n1", "", "pass"),  # of a module with parameters
        ("n3", "", "fail"),
        ("n2", "first", "fail"),  # the mask of the other forward
    ],
)
def test_random_recompute_fails_if_recomputation_draws_differently(
    state: str, applied: str, status: str
) -> None:
    assert finding(recomputed(state, applied), "random.recompute").status == status


def test_draws_that_cannot_be_compared_are_said_and_counted() -> None:
    of = made_up(*[{"applied": ""}] * 4)
    found = finding(of, "random.replicas")
    assert (found.status, found.not_compared) == ("skipped", 16)
    assert "16 draws could not be: they are in modules with parameters" in found.message


def test_other_states_are_other_numbers_in_a_module_with_parameters() -> None:
    of = made_up(*[{"applied": ""}] * 4)
    found = finding(of, "random.data")
    assert (found.status, found.compared) == ("pass", 16)


def test_equal_numbers_in_a_module_with_parameters_are_inconclusive() -> None:
    """The module may drop elements, or itself as a whole on all ranks alike."""
    of = made_up(*[{"applied": "", "state": "one"}] * 4)
    found = finding(of, "random.data")
    assert (found.status, found.not_compared) == ("inconclusive", 16)
    assert (
        "draws the same numbers for different data (ranks 0, 1, 2, 3)" in found.message
    )
    # a dropout beside it shows how ranks are seeded
    for trace in of.ranks:
        for seen in trace.steps:
            state = f"{trace.rank // 2} at {seen.step}"
            seen.draws.append(Draw(**{**DROPOUT, "state": state, "applied": state}))
    assert finding(of, "random.data").status == "pass"


@pytest.mark.parametrize("steps", [4, 1])
def test_a_module_that_draws_on_some_ranks_alone_fails(steps: int) -> None:
    of = made_up(*[{"applied": ""}] * 4)
    for trace in of.ranks:
        del trace.steps[steps:]
        for seen in trace.steps if trace.rank == 2 else ():
            seen.draws = []
    found = finding(of, "random.size")
    # in one step, a layer that is dropped by chance looks the same
    assert (found.status == "fail") == (steps > 1)
    assert steps == 1 or "rank 2 draws no number there in any step" in found.message


def test_dropouts_in_modules_that_are_not_seen_are_inconclusive() -> None:
    of = made_up(RIGHT, RIGHT, RIGHT, RIGHT)
    for trace in of.ranks:
        trace.dropouts = {"drop": 0.5}
        for seen in trace.steps:
            seen.draws, seen.drawn_outside = [], 1
    found = finding(of, "random.size")
    assert found.status == "inconclusive"
    assert (
        "the model has the dropout drop, and gradparity saw none draw" in found.message
    )


def test_a_run_that_drew_nothing_is_no_pass() -> None:
    of = made_up(RIGHT, RIGHT, RIGHT, RIGHT)
    for trace in of.ranks:
        for seen in trace.steps:
            seen.draws = []
    for law in ("random.replicas", "random.data", "random.recompute"):
        assert finding(of, law).status == "inconclusive"
        assert (
            "none were drawn on any rank: is the model in eval"
            in finding(of, law).message
        )
