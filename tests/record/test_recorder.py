"""Recordings of training loops in this process."""

import copy
import gc
import itertools
import pickle
import random
import weakref
from collections import UserDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradparity
from gradparity.conformance.record.beside import left_out
from gradparity.conformance.record.compare import NOT_COMPARABLE, SAME, compare
from gradparity.conformance.record.differences import Row
from gradparity.conformance.record.equal import other_inputs, proved_names
from gradparity.conformance.record.exact import compare_exactly
from gradparity.conformance.record.files import read_run
from gradparity.conformance.record.kept import IDLE, RESULT, Box
from gradparity.conformance.record.merge import Run, Side, read_merged
from gradparity.conformance.record.modules import OUTPUT
from gradparity.conformance.record.orders import Orders
from gradparity.conformance.record.recorder import Recorder
from gradparity.conformance.record.roots import Roots
from gradparity.conformance.record.rows import MOST, bags_of, rows_of
from gradparity.multiprocess import Cluster, WorldError, current_world

Losses = Iterator[Tensor]


def record(folder: Path, losses: Losses, **orders: Any) -> None:
    """Record a loop given as a generator of losses; run backward of each loss."""
    gc.collect()  # models of other tests would count, as those of one job
    recorder = Recorder(Orders(out=str(folder), **orders))
    recorder.install()
    try:
        for loss in losses:
            loss.backward()
        recorder.write()
    finally:
        recorder.remove()


def recorded(folder: Path, losses: Losses, **orders: Any) -> Run:
    record(folder, losses, **orders)
    return read_merged(folder)


def rows(step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def trains(model: nn.Module, optimizer: Any, steps: int = 1) -> Losses:
    """Yield the losses of a plain training loop."""
    for step in range(steps):
        optimizer.zero_grad()
        yield model(rows(step)).sum()
        optimizer.step()


def test_an_optimizer_that_begins_late_is_recorded(tmp_path: Path) -> None:
    """The generator of a GAN steps first after five steps of its critic."""
    critic, generator = nn.Linear(3, 1), nn.Linear(3, 3)
    fast = torch.optim.SGD(critic.parameters(), 0.1)
    slow = torch.optim.SGD(generator.parameters(), 0.1)

    def losses() -> Losses:
        for step in range(10):
            fast.zero_grad()
            yield critic(rows(step)).square().sum()
            fast.step()
            if step % 5 == 4:
                slow.zero_grad()
                yield critic(generator(rows(step))).square().sum()
                slow.step()

    run = recorded(tmp_path, losses(), steps=(0, 1))
    names = {"weight", "bias", "weight (model 2)", "bias (model 2)"}
    assert {*run.names("gradient", 0)} == names
    assert run.steps == [0] and run.unstepped == ()


def test_an_optimizer_that_never_steps_ends_no_recording(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    idle = torch.optim.SGD(other.parameters(), 0.1)

    def losses() -> Losses:
        for step in range(3):
            optimizer.zero_grad()
            yield (model(rows(step)) + other(rows(step))).sum()
            optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 2))
    assert run.steps == [0, 1] and idle.state == {}
    assert run.unstepped == ("bias (model 2)", "weight (model 2)")


@pytest.mark.parametrize("is_other", [True, False])
def test_a_training_after_the_recorded_one_leaves_a_mark(
    is_other: bool, tmp_path: Path
) -> None:
    """An encoder is trained, and then a classifier on it, or the encoder again."""
    encoder, head = nn.Linear(3, 3), nn.Linear(3, 2)
    first = torch.optim.SGD(encoder.parameters(), 0.1)

    def losses() -> Losses:
        yield from trains(encoder, first, steps=3)
        model = nn.Sequential(encoder, head) if is_other else encoder
        yield from trains(model, torch.optim.Adam(model.parameters()), steps=2)

    record(tmp_path, losses(), steps=(0, 2))
    texts = [path.read_text() for path in tmp_path.glob("late-*")]
    assert texts == ["Adam of 2 tensors"] * is_other


def test_optimizers_of_an_inner_loop_are_not_collected(tmp_path: Path) -> None:
    """Meta-learning makes an optimizer for each task: the first ones are recorded."""
    model = nn.Linear(3, 1)
    outer = torch.optim.SGD(model.parameters(), 0.1)
    idle = torch.optim.SGD(nn.Linear(3, 1).parameters(), 0.1)
    steps = 2

    def losses() -> Losses:
        for task in range(6):
            copied = copy.deepcopy(model)
            inner = torch.optim.SGD(copied.parameters(), 0.1)
            for step in range(steps):
                yield copied(rows(step)).sum()
                inner.step()
            yield model(rows(task)).sum()
            outer.step()

    run = recorded(tmp_path, losses(), steps=(0, steps))
    optimizers = {name for _, _, name in run.tensors if name.startswith("weight")}
    assert len(optimizers) == 2 and idle.state == {}
    told = "rank 0: optimizers that were made after another one had made its steps are"
    assert any(note.startswith(told) for note in run.notes)


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, **orders: Any) -> Recorder:
    """Return a recorder of this process; the caller has to remove it."""
    each = Recorder(Orders(out=str(folder), **orders))
    monkeypatch.setattr("gradparity.conformance.record.recorder.recorder", each)
    each.install()
    return each


def test_only_what_the_job_declares_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inner loop trains copies of the model before each step."""
    each = installed(tmp_path, monkeypatch, steps=(0, 2))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        with gradparity.record(model, optimizer):
            for step in range(3):
                fast = copy.deepcopy(model)
                inner = torch.optim.SGD(fast.parameters(), 0.1)
                for loss in trains(fast, inner, 3):
                    loss.backward()
                optimizer.zero_grad()
                model(rows(step)).sum().backward()
                optimizer.step()
    finally:
        each.remove()
    run = read_merged(tmp_path)
    assert run.names("weight", 0) == ["weight", "bias"] and run.steps == [0, 1]
    assert run.unstepped == () and run.notes == () and run.outputs == {"float32"}
    assert {step: len(of_step) for step, of_step in run.rows.items()} == {0: 4, 1: 4}


class OwnOptimizer:
    """Optimizer that is not one of torch."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [*parameters], "lr": 0.1}]

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad


SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize(
    "kinds", [(SGD, SGD), (OwnOptimizer, SGD), (SGD, OwnOptimizer)]
)
def test_nested_blocks_are_all_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: Any, is_list: bool
) -> None:
    """The inner one took the place of the outer one, whose faults were not seen."""
    each = installed(tmp_path, monkeypatch, steps=(0, 2))
    models = nn.Linear(3, 1), nn.Linear(3, 2)
    optimizers = [kind(m.parameters()) for kind, m in zip(kinds, models, strict=True)]
    first, second = ([o] if is_list else o for o in optimizers)
    try:
        with gradparity.record(models[0], first), gradparity.record(models[1], second):
            for step in range(2):
                for model, optimizer in zip(models, optimizers, strict=True):
                    model(rows(step)).sum().backward()
                    optimizer.step()
    finally:
        each.remove()
    run = read_merged(tmp_path)
    assert len({name for _, kind, name in run.tensors if kind == "gradient"}) == 4
    assert run.steps == [0, 1] and run.notes == ()


def test_a_block_after_the_end_of_the_recording_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    each = installed(tmp_path, monkeypatch, steps=(0, 3))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        for step in range(3):
            with gradparity.record(model, optimizer):
                model(rows(step)).sum().backward()
                optimizer.step()
    finally:
        each.remove()
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "has ended before, after 1 step, and this" in told


def test_arguments_that_are_no_optimizers_do_not_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = installed(tmp_path, monkeypatch, steps=(0, 1))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrong: Any = optimizer, model
    try:
        with gradparity.record(*wrong):
            model(rows(0)).sum().backward()
            optimizer.step()
    finally:
        each.remove()
    assert "an optimizer of record()" in str(each.recording.notes)


@pytest.mark.parametrize(
    "place",
    [
        ("weight", (1, 3)),
        ("weight", (1, 3), (0, 1)),
        ("weight", (1, 3), (-1, 0)),
        ("weight", (1, 3), (1,)),
        ("weight", (1, 3), (0, 0.0)),
        (None, (1, 3), (0, 0)),
    ],
)
def test_a_place_outside_of_the_whole_tensor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any
) -> None:
    each = installed(tmp_path, monkeypatch, steps=(0, 1))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def places(name: str, _: Any) -> Any:
        return place if name == "weight" else None

    try:
        with gradparity.record(model, optimizer, places=places):
            model(rows(0)).sum().backward()
            optimizer.step()
    finally:
        each.remove()
    told = str(each.recording.notes)
    assert "for weight, whose part has shape [1, 3]. Expected: (name in the" in told


def test_the_norms_by_which_a_job_clips_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch.nn.utils.clip_grads_with_norm_
    each = installed(tmp_path, monkeypatch, steps=(0, 2))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = []
    try:
        for step in range(3):
            optimizer.zero_grad()
            model(rows(step)).sum().backward()
            norms += [float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))]
            if step == 1:
                whole = torch.tensor(2.0, dtype=torch.bfloat16)
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), 9.0, whole)
            optimizer.step()
        each.write()  # there may be optimizers of other tests
    finally:
        each.remove()
    assert torch.nn.utils.clip_grads_with_norm_ is own
    unit, coarse = 2.0**-23, 2.0**-7
    first, second = [norms[0], 0.5, unit], [norms[1], 0.5, unit]
    assert each.recording.norms == {0: [first], 1: [second, [2.0, 9.0, coarse]]}
    _, recording = next(read_run(tmp_path))
    assert recording.norms == each.recording.norms
    limit = "limit of clip_grad_norm_"
    groups = [call.settings[0].values for call in recording.calls]
    assert groups[0][limit] == 0.5 and limit not in groups[1]  # two limits


def test_a_range_of_the_flattened_tensor_is_a_place() -> None:
    weight = nn.Parameter(torch.ones(4))
    roots = Roots()
    for start in (3, torch.tensor(3)):
        roots.places = lambda name, _, start=start: (name, (2, 4), (start,))
        (piece,) = roots.pieces("a", weight, Box((4,), (0,), (4,)))
        assert piece.box == Box((2, 4), (3,), (4,))
        assert type(piece.box.offsets[0]) is int


class Wrapper(torch.optim.Optimizer):
    """Passes ``step`` on without torch's hooks, as accelerate's optimizer does."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self.wrapped = wrapped

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # of the wrapped one
        return self.wrapped.param_groups

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        self.wrapped.step()


class Group(Wrapper):
    """Steps another optimizer, and has no param groups: torch's init is not called."""

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # it has none
        raise AttributeError

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.wrapped.zero_grad(set_to_none)


def test_buffers_are_compared_to_the_bit(tmp_path: Path) -> None:
    """No gradient of training shows running statistics that a resume has lost."""

    def run(name: str, momentum: float) -> Run:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3, momentum=momentum)
        norm.register_buffer("cache", torch.full((1,), momentum), persistent=False)
        model = nn.Sequential(nn.Linear(3, 3), norm)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return recorded(tmp_path / name, trains(model, optimizer, 2), steps=(0, 2))

    one, other = run("one", 0.1), run("other", 0.2)
    names = {name for _, kind, name in one.tensors if kind == "buffer"}
    assert names == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    told = compare_exactly(Side(name="a", run=one), Side(name="b", run=other)).lines
    assert told == [
        "step 0: the value of 1.running_mean has other bits",
        "1 more difference in that step",
    ]
    same = compare_exactly(Side(name="a", run=one), Side(name="b", run=one))
    assert same.code == 0


class Doubles(nn.BatchNorm1d):
    """Batch norm that computes in fp64: it rounds otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        size = self.num_features
        double = nn.BatchNorm1d(size, momentum=self.momentum, affine=False).double()
        double.load_state_dict(dict(self.named_buffers()))
        y: Tensor = double(x.double())
        with torch.no_grad():
            for mine, its in zip(self.buffers(), double.buffers(), strict=True):
                mine.copy_(its)
        return y.to(x.dtype) * self.weight + self.bias


def with_statistics(folder: Path, how: str, nudge: int) -> Run:
    torch.manual_seed(0)
    kind = Doubles if how == "in fp64" else nn.BatchNorm1d
    norm = kind(3, momentum=0.2 if how == "momentum" else 0.1)
    model = nn.Sequential(nn.Linear(3, 3), norm, nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    twice = how in ("repeats", "unlike")

    def losses() -> Losses:
        for step in range(2):
            optimizer.zero_grad()
            loss = model(rows(step)).sum()
            if twice and step == 1:
                with torch.no_grad():
                    model(rows(step))
            yield loss
            optimizer.step()

    return recorded(folder, losses(), steps=(0, 2), nudge=nudge)


@pytest.mark.parametrize(
    ("how", "headline"),
    [
        ("plain", "same: "),
        ("in fp64", "same: "),
        ("momentum", "step 0: the 1.running_"),
        ("repeats", "step 1: the 1.running_"),
        ("unlike", "same: "),
    ],
)
def test_running_statistics_are_compared(
    tmp_path: Path, how: str, headline: str
) -> None:
    """Ranks that hold other ones, as without SyncBatchNorm, say nothing of them."""
    one, *noisy = (
        with_statistics(tmp_path / f"{n}", "plain", max(0, n - 1)) for n in range(4)
    )
    other = with_statistics(tmp_path / "other", how, 0)
    if how == "unlike":
        tensors = {
            key: replace(each, unlike=(1,)) if key[1] == "buffer" else each
            for key, each in other.tensors.items()
        }
        other = replace(other, tensors=tensors)
    given = Side(name="one", run=one, noisy=noisy)
    found = compare(given, Side(name="mesh", run=other))
    assert found.headline.startswith(headline), found.lines
    statistics = [row for row in found.rows if row.kind == "buffer"]
    assert len(statistics) == (0 if how == "unlike" else 4)
    if how == "in fp64":
        assert 0 < max(row.ratio for row in statistics) < 0.5
    told = any("running statistics are computed" in each for each in found.leads)
    assert told is ("same" not in headline)


class Own(nn.Module):
    """Norm of a user, whose statistics enter no output."""

    running_mean: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean += x.mean(0)
        return x


class Instance(nn.InstanceNorm1d):
    """Norm of each row alone, with statistics of its forwards."""

    def __init__(self, size: int) -> None:
        super().__init__(size, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(torch.stack([x, x.square(), x.sin()], 2))
        return y[..., 0]


def of_rows_with_mean_0(folder: Path, norm: Any, parts: int = 1, nudge: int = 0) -> Run:
    """Train on rows whose columns have means near 0, in parts of a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(norm(5), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def losses() -> Losses:
        for step in range(2):
            optimizer.zero_grad()
            x = torch.randn(64, 5, generator=torch.Generator().manual_seed(step))
            for part in ((x - x.mean(0)) / x.std(0)).chunk(parts):
                yield model(part).square().mean() / parts
            optimizer.step()

    return recorded(folder, losses(), steps=(0, 2), nudge=nudge)


@pytest.mark.parametrize(
    ("norm", "its", "parts"),
    [
        (nn.BatchNorm1d, Doubles, 1),  # a mean is a rest of rounding
        (Own, Own, 2),
        (Instance, Instance, 2),
    ],
)
def test_other_statistics_of_right_jobs_are_no_difference(
    tmp_path: Path, norm: Any, its: Any, parts: int
) -> None:
    one, *noisy = (
        of_rows_with_mean_0(tmp_path / f"{n}", norm, nudge=max(0, n - 1))
        for n in range(4)
    )
    other = of_rows_with_mean_0(tmp_path / "other", its, parts)
    found = compare(Side(name="a", run=one, noisy=noisy), Side(name="b", run=other))
    assert found.code == 0, found.lines
    keys = [key for key in one.tensors if key[1] == "buffer"]
    assert any(one.tensors[key].digest != other.tensors[key].digest for key in keys)


def odd_buffers() -> Iterator[Tensor]:
    yield torch.eye(3).to_sparse()
    yield torch.eye(3).to_sparse_csr()
    yield torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    yield torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    yield torch.ones(3, device="meta")
    yield torch.ones(3, dtype=torch.bool)


@pytest.mark.filterwarnings("ignore")  # some of these kinds are prototypes of torch
def test_buffers_without_plain_bits_are_left_out(tmp_path: Path) -> None:
    """One of them ended the job with a segmentation fault."""
    model = nn.Linear(3, 1)
    for number, buffer in enumerate(odd_buffers()):
        model.register_buffer(f"odd_{number}", buffer)
    model.register_buffer("count", torch.ones(3, dtype=torch.int8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = recorded(tmp_path, trains(model, optimizer), steps=(0, 1))
    assert run.names("buffer", 0) == ["count"] and run.notes == ()
    assert run.names("weight", 0) == ["weight", "bias"]


def test_an_error_of_the_recorder_ends_no_job(tmp_path: Path) -> None:
    """It was raised after the last recorded step, out of ``step``."""
    model = nn.Linear(3, 1)
    group = Group(torch.optim.SGD(model.parameters(), 0.1))
    run = recorded(tmp_path, trains(model, group, 4), steps=(0, 2))
    assert run.steps == [0, 1] and run.notes == ()


def test_settings_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    """``group["lr"] = schedule[step]``: the recording was lost, or the rate of fp32."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    group = optimizer.param_groups[0]
    group["lr"], group["weight_decay"] = np.float64(0.25), np.float32(0.5)
    group["warmup"] = np.int64(3)
    run = recorded(tmp_path, trains(model, optimizer), steps=(0, 1))
    values = run.settings[0, "weight"]
    kinds = {key: (values[key], type(values[key])) for key in group if key in values}
    due = {"lr": (0.25, float), "weight_decay": (0.5, float), "warmup": (3, int)}
    assert {key: kinds[key] for key in due} == due


@pytest.mark.parametrize("draws", [random.random, np.random.random, torch.rand])
def test_random_numbers_of_a_forward_are_seen(tmp_path: Path, draws: Any) -> None:
    class Draws(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            draws(*([1] if draws is torch.rand else []))
            return super().forward(inputs)

    model = Draws(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = recorded(tmp_path, trains(model, optimizer), steps=(0, 1))
    assert run.drew == {0}


def test_a_recorder_keeps_no_tensor_after_its_last_step(tmp_path: Path) -> None:
    """A job may train one model after another, and needs the memory."""

    def losses() -> Losses:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        refs = [weakref.ref(each) for each in (model, optimizer, model.weight)]
        yield from trains(model, optimizer, 2)
        del model, optimizer
        yield torch.zeros((), requires_grad=True)  # the loss before holds the model
        gc.collect()
        assert [each() for each in refs] == [None] * 3

    assert recorded(tmp_path, losses(), steps=(0, 2)).steps == [0, 1]


def test_a_fork_of_a_recorded_process_writes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(Orders(out=str(tmp_path), steps=(0, 3)))
    recorder.install()
    try:
        for loss in trains(model, optimizer, 2):
            loss.backward()
        recorder.process -= 1  # as in a child
        recorder.write()
        assert not [*tmp_path.iterdir()]
        recorder.process += 1
        recorder.write()
    finally:
        recorder.remove()
    assert read_merged(tmp_path).steps == [0, 1]


@dataclass
class Descent:
    """An optimizer that is not one of torch, and that a job saves."""

    param_groups: Any

    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= 0.1 * parameter.grad

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def test_an_optimizer_can_be_saved_while_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = installed(tmp_path, monkeypatch, steps=(0, 2))
    model, before = nn.Linear(3, 1), Descent.step
    optimizer, other = (
        Descent([{"params": [*m.parameters()], "lr": 0.1}])
        for m in (model, nn.Linear(3, 1))
    )
    try:
        with gradparity.record(model, optimizer):
            pickle.dumps(optimizer)
            copy.deepcopy(optimizer)
            for trained in (optimizer, other):
                for loss in trains(model, trained, 1):
                    for parameter in other.param_groups[0]["params"]:
                        parameter.grad = torch.zeros_like(parameter)
                    loss.backward()
    finally:
        each.remove()
    assert Descent.step is before and "step" not in vars(optimizer)
    assert read_merged(tmp_path).steps == [0]  # steps of the other one do not count


class Slotted(Descent):
    __slots__ = ("step",)


class Static(Descent):
    """Its ``step`` knows no instance."""

    trained: Any = None

    @staticmethod
    def step() -> None:
        Descent.step(Static.trained)


@pytest.mark.parametrize("kind", [Descent, Slotted, Static])
def test_a_step_that_is_no_method_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """A job may count the steps of its optimizer in an attribute."""
    each = installed(tmp_path, monkeypatch, steps=(0, 1))
    model = nn.Linear(3, 1)
    optimizer: Any = kind([{"params": [*model.parameters()], "lr": 0.1}])
    if kind is Static:
        kind.trained, before = optimizer, Static.step
    else:
        optimizer.step = before = partial(Descent.step, optimizer)
    try:
        with gradparity.record(model, optimizer):
            model(rows(0)).sum().backward()
            optimizer.step()
    finally:
        each.remove()
    assert read_merged(tmp_path).steps == [0] and optimizer.step is before


@pytest.mark.parametrize("wrap", [Wrapper, lambda optimizer: optimizer])
def test_all_models_of_the_declared_optimizers_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: Any
) -> None:
    """Two models have an optimizer each, and one optimizer is declared."""
    each = installed(tmp_path, monkeypatch, steps=(0, 1), nudge=1)
    models = nn.Linear(3, 3), nn.Linear(3, 1)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    optimizers = [wrap(torch.optim.SGD(m.parameters(), 0.0)) for m in models]
    try:
        with gradparity.record(models[0], *optimizers):
            models[1](models[0](rows(0))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    finally:
        each.remove()
    assert len(read_merged(tmp_path).names("gradient", 0)) == 4
    for model, weights in zip(models, before, strict=True):  # a nudge has moved it
        assert not torch.equal(model.weight, weights["weight"])


def test_a_parameter_of_two_optimizers_has_two_names(tmp_path: Path) -> None:
    """The head is trained alone first, so its weight differs when all are trained."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    head = torch.optim.SGD(model[1].parameters(), 0.1)
    both = torch.optim.SGD(model.parameters(), 0.1)

    def losses() -> Losses:
        for optimizer in (head, both):
            yield model(rows(0)).sum()
            optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 1))
    assert "1.weight (optimizer 1)" in run.starts and "0.weight" in run.starts
    off = replace(run.tensors[0, "weight", "1.weight (optimizer 1)"], digest=1)
    key = (0, "weight", "1.weight (optimizer 1)")
    other = replace(run, tensors={**run.tensors, key: off})
    names, told = proved_names(run, other)
    assert names.keys() == run.starts.keys() and "and 1 that join later" in told


def test_rows_of_an_embedding_have_a_gradient(tmp_path: Path) -> None:
    words = nn.Embedding(6, 2, sparse=True)
    optimizer = torch.optim.SGD(words.parameters(), 0.1)

    def losses() -> Losses:
        yield words(torch.tensor([[1, 4]])).square().sum()
        optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 1))
    (gradient,) = (each for key, each in run.tensors.items() if key[1] == "gradient")
    assert gradient.is_whole and gradient.norm > 0
    assert (0, "update", "weight") in run.tensors and run.notes == ()


@pytest.mark.parametrize("is_lazy", [False, True])
def test_the_update_of_rows_without_a_gradient_is_read(
    tmp_path: Path, is_lazy: bool
) -> None:
    class Lazy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            before = words.weight.detach().clone()
            super().step(closure)
            if is_lazy:
                words.weight.data[:4] = before[:4]

    words = nn.Embedding(6, 2)
    optimizer = Lazy(words.parameters(), 0.1, weight_decay=0.5)

    def losses() -> Losses:
        yield words(torch.tensor([[4, 5]])).square().sum()
        optimizer.step()

    start = words.weight.detach().clone()
    run = recorded(tmp_path, losses(), steps=(0, 1))
    update = run.tensors[0, IDLE, "weight"].sketch
    assert update is not None and run.tensors[0, IDLE, "weight"].digest
    due = torch.zeros_like(start) if is_lazy else -0.05 * start
    due[4:] = 0
    torch.testing.assert_close(torch.from_numpy(update).view(6, 2), due)


OVERWRITES: dict[str, tuple[Any, dict[str, Any], float | None]] = {
    "adds momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, None),
    "divides by the scale": (torch.optim.AdamW, {"fused": True}, 8.0),
}


@pytest.mark.parametrize("how", OVERWRITES)
def test_an_update_is_recorded_if_a_kernel_overwrites_gradients(
    tmp_path: Path, how: str
) -> None:
    """Both kernels make one update, and only the second one changes gradients."""
    kind, options, scale = OVERWRITES[how]

    def losses(model: nn.Module, by: Any, *, changes: bool) -> Losses:
        factor = scale if changes else None
        yield (model(rows(0)) ** 2).sum() * (factor or 1.0)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if factor:
            by.grad_scale = torch.tensor([factor])
        by.step()
        gradients = (p.grad for p in model.parameters() if p.grad is not None)
        assert changes is not all(map(torch.equal, gradients, before))

    updates = list[Tensor]()
    for changes in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = kind(
            model.parameters(), 0.1, foreach=changes and not scale, **options
        )
        each = losses(model, optimizer, changes=changes)
        run = recorded(tmp_path / str(changes), each, steps=(0, 1))
        sketch = run.tensors[0, "update", "weight"].sketch
        assert sketch is not None
        updates.append(torch.from_numpy(sketch))
    torch.testing.assert_close(*updates)
    assert updates[0].any()


@pytest.mark.parametrize("fused", [False, True])
def test_no_update_is_recorded_if_the_job_changes_gradients_in_a_step(
    tmp_path: Path, fused: bool
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
    if fused:  # its kernel divides the gradients, too
        optimizer.grad_scale = torch.tensor([8.0])  # type: ignore[attr-defined]  # as torch's scaler does

    def empties(optimizer: Any, *_: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    optimizer.register_step_post_hook(empties)
    run = recorded(tmp_path, trains(model, optimizer), steps=(0, 1))
    assert {kind for _, kind, _ in run.tensors} == {"weight", "gradient", RESULT}


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_written(tmp_path: Path, bad: float) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def losses() -> Losses:
        yield (model(rows(0)) * bad).sum()
        optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 1))
    assert not run.tensors[0, "gradient", "weight"].is_finite
    assert run.tensors[0, "weight", "weight"].is_finite


def test_a_kernel_that_skips_is_a_step_that_is_skipped(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def losses() -> Losses:
        for found_inf in (1.0, 0.0):
            yield model(rows(0)).sum()
            optimizer.grad_scale = torch.ones(1)  # type: ignore[attr-defined]  # as torch's scaler does
            optimizer.found_inf = torch.full((1,), found_inf)  # type: ignore[attr-defined]  # as above
            optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 2))
    assert run.skipped == {(0, "weight"), (0, "bias")}


def test_a_model_can_be_saved_copied_and_traced_while_it_is_recorded(
    tmp_path: Path,
) -> None:
    """A hook on the model would be saved and copied, and the recorder with the hook."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saved = pickle.dumps(model)

    def losses() -> Losses:
        for step in range(2):
            optimizer.zero_grad(set_to_none=True)
            yield model(rows(step)).sum()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            assert len(pickle.dumps(model)) == len(saved)
            copied = copy.deepcopy(model)
            assert all(not m._forward_pre_hooks for m in copied.modules())
            assert all(not m._forward_hooks for m in copied.modules())
            torch.export.export(model, (rows(step),))

    run = recorded(tmp_path, losses(), steps=(0, 2))
    assert run.steps == [0, 1] and run.notes == ()
    assert {*run.rows} == {0, 1}


class Keyword(nn.Module):
    """A linear layer with a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(3, 1)

    def forward(self, *, rows: Tensor) -> Tensor:
        outputs: Tensor = self.inside(rows)
        return outputs


def test_a_model_that_is_compiled_in_place_is_recorded(tmp_path: Path) -> None:
    """Its hooks are part of the compiled code."""
    plain = nn.Module.compile

    def losses() -> Losses:
        model = Keyword()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.compile(backend="eager", fullgraph=True)
        for step in range(2):
            optimizer.zero_grad()
            yield model(rows=rows(step)).sum()
            optimizer.step()
        assert b"gradparity" not in pickle.dumps(model)
        copy.deepcopy(model)(rows=rows(0))

    run = recorded(tmp_path / "plain", losses(), steps=(0, 2))
    given = [rows_of([rows(step)], floats=True)[0].tolist() for step in range(2)]
    assert run.rows == {step: {*digests} for step, digests in enumerate(given)}
    assert run.notes == () and run.outputs == {"float32"}
    assert nn.Module.compile is plain
    torch.manual_seed(0)
    first = recorded(tmp_path / "first", losses(), steps=(0, 2))
    torch.manual_seed(0)
    nudged = recorded(tmp_path / "nudged", losses(), steps=(0, 2), nudge=1)
    key = (0, "weight", "inside.weight")
    assert first.tensors[key].digest != nudged.tensors[key].digest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_modules_that_return_16_bits_are_known(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    def wide(forward: Any, inputs: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return forward(inputs.float())

    def losses() -> Losses:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model[1].forward = partial(wide, model[1].forward)
        with torch.autocast("cpu", dtype):
            loss = model(rows(0)).sum()
        yield loss
        optimizer.step()

    known = recorded(tmp_path, losses(), steps=(0, 1)).in_16_bits
    assert known == dict.fromkeys(("0.weight", "0.bias"), str(dtype)[6:])


def test_a_part_that_is_called_before_the_model_is_no_model(tmp_path: Path) -> None:
    """A job may call a single layer first, to learn its output size."""

    def losses() -> Losses:
        body = nn.Linear(4, 2)
        size = body(torch.zeros(1, 4)).shape[1]
        model = nn.Sequential(nn.Linear(3, 4), body, nn.Linear(size, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            yield model(rows(step)).sum()
            optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 2), modules=True)
    given = [rows_of([rows(step)], floats=True)[0].tolist() for step in range(2)]
    assert run.rows == {step: {*digests} for step, digests in enumerate(given)}
    assert [*run.names(OUTPUT, 0)] == ["0", "1", "2"]


def test_a_model_that_is_wrapped_after_its_first_call_keeps_its_place(
    tmp_path: Path,
) -> None:
    """The generator of a GAN is called first, and later through a wrapper."""
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
    wrapped = nn.Sequential(generator)
    every = [*generator.parameters(), *critic.parameters()]
    optimizer = torch.optim.SGD(every, 0.1)

    def losses() -> Losses:
        yield critic(generator(rows(0)).detach()).sum()
        yield critic(wrapped(rows(1))).sum()
        optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 1), modules=True)
    given = [rows_of([rows(n)], floats=True)[0].tolist() for n in range(2)]
    assert run.rows == {0: {*given[0], *given[1]}}
    assert [*run.names(OUTPUT, 0)] == ["0"]


def test_updates_of_an_optimizer_that_writes_gradients_are_not_compared(
    tmp_path: Path,
) -> None:
    class Clips(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.clamp_(-0.1, 0.1)
            return super().step(closure)

    model = nn.Linear(3, 1)
    optimizer = Clips(model.parameters(), 0.1)

    run = recorded(tmp_path, trains(model, optimizer), steps=(0, 1))
    nudged = replace(run, tensors={**run.tensors, **_moved(run)})
    noisy = (run, nudged, nudged)
    lines = compare(Side(name="a", run=run, noisy=noisy), Side(name="b", run=run)).lines
    told = "not compared: 2 updates, because the optimizer writes into the gradient, or"
    assert any(line.startswith(told) for line in lines), lines


def _moved(run: Run) -> dict[Any, Any]:
    return {
        key: replace(each, digest=1)
        for key, each in run.tensors.items()
        if key[1] in ("weight", "gradient")
    }


def test_a_complex_parameter_is_recorded_as_pairs(tmp_path: Path) -> None:
    model = nn.Linear(3, 1, dtype=torch.complex64)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def losses() -> Losses:
        yield model(rows(0).to(torch.complex64)).abs().sum()
        optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 1), nudge=1)
    assert run.tensors[0, "gradient", "weight"].shape == (1, 3, 2)
    assert run.tensors[0, "update", "weight"].norm > 0 and run.notes == ()


def test_a_tensor_that_no_module_has_is_named_by_its_position(tmp_path: Path) -> None:
    prompt = [torch.ones(2, requires_grad=True) for _ in range(2)]
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *prompt], 0.1)

    def losses() -> Losses:
        yield model(sum(prompt)).sum()
        optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 1))
    assert run.names("gradient", 0) == ["weight", "bias", "parameter 2", "parameter 3"]
    assert run.unnamed == 0


def test_the_first_call_of_a_lazy_model_makes_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    run = recorded(tmp_path, trains(model, optimizer, 2), steps=(0, 2))
    assert run.drew == frozenset() and run.notes == () and [*run.rows] == [1]


@dataclass
class Fields:
    """Batch as a dataclass of tensors, which some packages use."""

    words: Tensor


@pytest.mark.parametrize("kind", [Fields, lambda words: UserDict(words=words)])
def test_rows_are_found_in_what_holds_them(kind: Any) -> None:
    words = torch.tensor([[1, 2], [3, 4]])
    (digests,) = rows_of([kind(words)])
    assert torch.equal(digests, rows_of([words])[0])


def test_a_nested_tensor_has_a_row_in_each_part() -> None:
    parts = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    tokens = rows_of([torch.nested.nested_tensor(parts, layout=torch.jagged)])
    alone = [rows_of([part[None]])[0] for part in parts]
    assert all(map(torch.equal, tokens, alone)) and len(tokens) == 2


def test_a_sequence_of_tokens_is_a_row_where_nothing_has_rows() -> None:
    packed, other = torch.arange(6), torch.ones(6)
    (digests,) = rows_of([packed, other])
    assert torch.equal(digests, rows_of([packed[None]])[0])
    halves = [bags_of([half]) for half in packed.chunk(2)]
    assert bags_of([packed]) == [sum(bag for (bag,) in halves)]
    (of_rows,) = rows_of([packed, packed.reshape(3, 2)])
    assert torch.equal(of_rows, rows_of([packed.reshape(3, 2)])[0])


@pytest.mark.parametrize("is_float", [False, True])
def test_more_rows_than_are_kept_are_compared_as_a_whole(
    tmp_path: Path, is_float: bool
) -> None:
    """All rows in one call equal the same rows in two calls, but not other rows."""
    batch = torch.arange(2 * MOST)[:, None]
    words = batch.float() if is_float else batch

    def losses(parts: int, last: int) -> Losses:
        torch.manual_seed(0)
        model = nn.Linear(1, 1) if is_float else nn.Embedding(2 * MOST + 1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        given = torch.cat([words[:-1], words[-1:] + last])
        for part in given.chunk(parts):
            yield model(part).mean()
        optimizer.step()

    one, same, other = (
        recorded(tmp_path / str(number), losses(*each), steps=(0, 1))
        for number, each in enumerate([(1, 0), (2, 0), (2, 1)])
    )
    first, second, third = (Side(name="", run=run) for run in (one, same, other))
    assert not [*other_inputs(first, second, {}, 0)] and len(one.rows[0]) == MOST
    (text,) = other_inputs(first, third, {}, 0)
    assert text.startswith("rows differ at step 0: the model was given")


def test_calls_of_a_model_for_each_row_are_no_rows(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def losses() -> Losses:
        yield torch.vmap(model)(rows(0)[:, None]).sum()
        optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 1))
    assert run.names("gradient", 0) == ["weight", "bias"] and run.notes == ()
    assert run.rows == {} and run.losses == {}


def test_the_module_that_ddp_wraps_may_be_called_itself(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def losses() -> Losses:
            yield model(rows(0)).sum() + model.module(rows(1)).sum()
            optimizer.step()

        run = recorded(tmp_path, losses(), steps=(0, 1))
    finally:
        dist.destroy_process_group()
    assert len(run.rows[0]) == 8 and run.notes == ()


class Wrapped(nn.Module):
    """Another module around a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        wrapped: Tensor = self.module(x)
        return wrapped


def test_a_model_that_is_wrapped_anew_begins_once(tmp_path: Path) -> None:
    """Some jobs create DDP again when a part of the model begins to train."""

    def losses(seed: int) -> Losses:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        model[0].requires_grad_(seed == 0)
        optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
        called: nn.Module = model
        for step in range(2):
            yield called(rows(step)).square().sum()
            optimizer.step()
            model.requires_grad_()
            called = Wrapped(model)

    first = tmp_path / "first"
    run = recorded(first, losses(0), steps=(0, 2), keep_start=True)
    assert [len(run.rows[step]) for step in range(2)] == [4, 4]
    begun = recorded(tmp_path / "second", losses(1), steps=(0, 2), start=str(first))
    weights = [begun.tensors[step, "weight", "1.weight"] for step in range(2)]
    assert weights[0].digest == run.tensors[0, "weight", "1.weight"].digest
    assert weights[0].digest != weights[1].digest


def prompts(folder: str, starts_apart: bool) -> None:
    rank = current_world().rank
    prompt = torch.full((2,), float(rank * starts_apart), requires_grad=True)
    optimizer = torch.optim.SGD([prompt], 0.1)

    def losses() -> Losses:
        for _ in range(2):
            yield (prompt * (rank + 1)).sum()
            optimizer.step()

    record(Path(folder), losses(), steps=(0, 2))


@pytest.mark.parametrize("starts_apart", [False, True])
def test_a_tensor_of_no_module_is_a_replica_where_ranks_begin_equal(
    two: Cluster, tmp_path: Path, starts_apart: bool
) -> None:
    two.run(prompts, str(tmp_path), starts_apart)
    run = read_merged(tmp_path)
    assert run.unnamed == starts_apart
    drifts = (1, "weight", "parameter 0") in run.replicas
    assert drifts != starts_apart


class Averages(torch.optim.SGD):
    """Optimizer that sums gradients over ranks in its own step."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        return super().step(closure)


def destroys(folder: str) -> None:
    """Train fewer steps than are recorded, and destroy the process group."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(Orders(out=folder, steps=(0, 3)))
    recorder.install()
    try:
        for loss in trains(model, optimizer):
            loss.backward()
        dist.destroy_process_group()
        recorder.write()
    finally:
        recorder.remove()


def test_the_rank_is_that_of_the_recorded_steps(two: Cluster, tmp_path: Path) -> None:
    with suppress(WorldError):  # the ranks have no process group any more
        two.run(destroys, str(tmp_path))
    assert read_merged(tmp_path).ranks == 2


def averages(folder: str, rate: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = Averages(model.parameters(), rate)

    def losses() -> Losses:
        yield model(rows(current_world().rank)).square().sum()
        optimizer.step()

    record(Path(folder), losses(), steps=(0, 1))


@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_gradients_that_a_step_sums_are_averaged(
    two: Cluster, tmp_path: Path, rate: float
) -> None:
    """A step with rate 0 cannot show if the optimizer averages gradients."""
    two.run(averages, str(tmp_path), rate)
    run = read_merged(tmp_path)
    gradient = run.tensors[0, "gradient", "weight"]
    assert gradient.is_summed == (rate == 0) and bool(gradient.unlike) == (rate == 0)


def test_a_method_that_lightning_passes_through_a_wrapper_is_no_forward(
    tmp_path: Path,
) -> None:
    """On one process ``training_step`` is called itself, and its rows are others."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch: Tensor) -> Tensor:
            loss: Tensor = self.net(batch[:, :2]).square().mean()
            return loss

    def run(passes: bool) -> Run:
        torch.manual_seed(0)
        module = Whole()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)

        def forward(batch: Tensor) -> Tensor:
            del module.forward
            return module.training_step(batch)

        forward.__module__ = "pytorch_lightning.strategies.strategy"

        def losses() -> Losses:
            for step in range(2):
                optimizer.zero_grad()
                if passes:
                    module.forward = forward
                yield module(rows(step)) if passes else module.training_step(rows(step))
                optimizer.step()

        return recorded(tmp_path / str(passes), losses(), steps=(0, 2))

    one, other = run(passes=False), run(passes=True)
    assert one.rows == other.rows and len(one.rows[0]) == 4
    assert [*proved_names(one, other)[0]] == ["net.weight", "net.bias"]


def scaled(folder: Path, scale: float, nudge: int = 0) -> Run:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2)

    def losses() -> Losses:
        for step in range(3):
            optimizer.zero_grad()
            loss = model(rows(step)).square().mean()
            yield scaler.scale(loss) if scale else loss
            if scale:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()

    before = torch.amp.GradScaler.step
    run = recorded(folder, losses(), steps=(0, 3), nudge=nudge)
    assert torch.amp.GradScaler.step is before
    return run


@pytest.mark.parametrize(
    ("scale", "code"), [(8.0, SAME), (0.0, SAME), (4.0, NOT_COMPARABLE)]
)
def test_the_scale_of_a_loss_is_a_setting(
    tmp_path: Path, scale: float, code: int
) -> None:
    """It was not compared: a resume that lost its scaler was the same, bit for bit."""
    one, *noisy = (scaled(tmp_path / f"{n}", 8.0, max(0, n - 1)) for n in range(4))
    other = scaled(tmp_path / "other", scale)
    sides = Side(name="one", run=one, noisy=noisy), Side(name="mesh", run=other)
    assert [one.settings[s, "weight"]["loss scale"] for s in range(3)] == [8, 8, 16]
    found = compare(*sides)
    assert found.code == code, found.lines
    words = "step 0: loss scale of weight is 8 in one and 4 in mesh"
    assert (words in found.lines[0]) == (code == NOT_COMPARABLE), found.lines
    exactly = compare_exactly(*sides).headline
    assert (words in exactly) == (code == NOT_COMPARABLE), exactly


class MuonWithAdam(torch.optim.SGD):
    """A namesake that takes all parameters, and steps some otherwise."""


def test_updates_that_muon_makes_orthogonal_are_known(tmp_path: Path) -> None:
    ours, its = nn.Linear(3, 2), nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [
        {"params": [its.weight], "use_muon": True},
        {"params": [its.bias], "use_muon": False},
    ]
    optimizers: list[Any] = [
        torch.optim.Muon([ours.weight], lr=0.1),
        MuonWithAdam(groups, 0.1),
        torch.optim.SGD([ours.bias], 0.1),
    ]

    def losses() -> Losses:
        yield (ours(rows(0)) * its(rows(1))).sum()
        for optimizer in optimizers:
            optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 1))
    assert len(run.names("update", 0)) == 4
    weights = {name for name in run.names("update", 0) if name.startswith("weight")}
    assert run.orthogonal == weights and len(weights) == 2


def with_muon(folder: Path, pieces: int, nudge: int = 0) -> Run:
    torch.manual_seed(4)
    size = 64
    first, second, last = (nn.Linear(size, each) for each in (size, size, 1))
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)
    matrices = [first.weight, second.weight]
    rest = [first.bias, second.bias, *last.parameters()]
    optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.SGD(rest, 0.1)]

    def losses() -> Losses:
        for step in range(3):
            model.zero_grad()
            generator = torch.Generator().manual_seed(400 + step)
            batch = torch.randn(64, size, generator=generator).chunk(pieces)
            for piece in batch[1:]:
                (model(piece).square().mean() / pieces).backward()
            yield model(batch[0]).square().mean() / pieces
            before = [each.grad for each in matrices if each.grad is not None]
            values = [each.clone() for each in before]
            for optimizer in optimizers:
                optimizer.step()
            assert all(
                each.grad is own for each, own in zip(matrices, before, strict=True)
            )
            assert all(map(torch.equal, values, before))

    return recorded(folder, losses(), steps=(0, 3), nudge=nudge)


def test_gradients_of_muon_are_nudged(tmp_path: Path) -> None:
    """One rounding in its products moves the whole update, and no nudge flipped one."""
    one, *noisy = (with_muon(tmp_path / f"{n}", 1, max(0, n - 1)) for n in range(4))
    side = Side(name="one", run=one, noisy=noisy)
    same = compare(side, Side(name="mesh", run=with_muon(tmp_path / "mesh", 8)))
    assert same.code == SAME and "same: 36 tensors" in same.headline, same.lines


def averages_weights(folder: str, forgets: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def losses() -> Losses:
        for step in range(3):
            yield model(rows(current_world().rank)).square().sum()
            optimizer.step()
            for parameter in model.parameters() if step != forgets else ():
                dist.all_reduce(parameter.data, dist.ReduceOp.AVG)

    record(Path(folder), losses(), steps=(0, 3))


@pytest.mark.parametrize("forgets", [-1, 0, 1])
def test_weights_that_are_averaged_after_each_step(
    two: Cluster, tmp_path: Path, forgets: int
) -> None:
    """Weights after the last step are read before that, and are left out."""
    two.run(averages_weights, str(tmp_path), forgets)
    run = read_merged(tmp_path)
    unlike = {step for step, kind, _ in run.replicas if kind == "weight"}
    assert unlike == ({forgets + 1, 3} if forgets >= 0 else set())
    assert run.early == (() if forgets >= 0 else ("bias", "weight"))
    gradient = run.tensors[2, "gradient", "weight"]
    assert bool(gradient.unlike) is gradient.is_summed is (forgets >= 0)
    exact = read_merged(tmp_path, exact=True)
    assert exact.tensors[2, "gradient", "weight"].digest is not None
    assert (3, "weight", "weight") in exact.replicas


def sends_weights(folder: str, averaged: Sequence[str]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def losses() -> Losses:
        for _ in range(3):
            yield model(rows(current_world().rank)).square().sum()
            optimizer.step()
            for name, parameter in model.named_parameters():
                if name in averaged:
                    dist.all_reduce(parameter.data, dist.ReduceOp.AVG)
                else:
                    dist.broadcast(parameter.data, 1)

    record(Path(folder), losses(), steps=(0, 3))


@pytest.mark.parametrize("averaged", [(), ("bias",)])
def test_weights_of_one_rank_that_others_take_over(
    two: Cluster, tmp_path: Path, averaged: Sequence[str]
) -> None:
    """If the job averages another weight, a mean may equal one rank's by chance."""
    two.run(sends_weights, str(tmp_path), averaged)
    run = read_merged(tmp_path)
    leaders = {} if averaged else {"bias": (1,), "weight": (1,)}
    assert run.leaders == leaders and run.early == ("bias", "weight")
    own = dict(read_run(tmp_path))[1].tensors
    for step, kind in itertools.product(range(3), ("gradient", "update")):
        whole = run.tensors.get((step, kind, "weight"))
        mine = None if whole is None else whole.sketch
        its = own[f"0/{step}/{kind}/0/weight"].sketch
        assert np.array_equal(np.asarray(mine), np.asarray(its)) is not bool(averaged)


def sends_in_turn(folder: str, how: str) -> None:
    """Reduce the gradients to one rank, which sends its weights.

    Args:
        folder: folder of the recording.
        how: ``rotates``: the rank is another one in each step. ``owners``: each
            parameter has a rank of its own. ``signs``: the first steps of Adam on the
            bias are equal on all ranks.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    here = current_world().rank

    def losses() -> Losses:
        for step in range(3):
            optimizer.zero_grad()
            yield (model(rows(step)[2 * here : 2 * here + 2]) - 9).square().mean() / 2
            leaders = {"rotates": [step % 2] * 2, "owners": [0, 1]}.get(how, [1, 1])
            for rank, parameter in zip(leaders, model.parameters(), strict=True):
                assert parameter.grad is not None
                total = parameter.grad.clone()
                dist.all_reduce(total)
                if here == rank:
                    parameter.grad.copy_(total)
            optimizer.step()
            for rank, parameter in zip(leaders, model.parameters(), strict=True):
                dist.broadcast(parameter.data, rank)

    record(Path(folder), losses(), steps=(0, 3))


@pytest.mark.parametrize("how", ["signs", "rotates", "owners"])
def test_gradients_of_other_ranks_than_leaders_are_not_compared(
    two: Cluster, tmp_path: Path, how: str
) -> None:
    two.run(sends_in_turn, str(tmp_path / "two"), how)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def losses() -> Losses:
        for step in range(3):
            optimizer.zero_grad()
            yield (model(rows(step)) - 9).square().mean()
            optimizer.step()

    one = recorded(tmp_path / "one", losses(), steps=(0, 3))
    run = read_merged(tmp_path / "two")
    count = 0
    for (step, kind, name), mine in one.tensors.items():
        its = run.tensors.get((step, kind, name))
        if kind == "gradient" and its is not None:
            assert its.distance(mine) < 1e-5 * mine.norm, (step, name)
            count += 1
    # who leads the last step is not known, nor who leads where results are equal
    assert count == {"signs": 6, "rotates": 3, "owners": 4}[how]
    compared = [
        Row(step=step, kind=kind, name=name, distance=0, bound=1, noise=0)
        for step, kind, name in one.tensors.keys() & run.tensors.keys()
    ]
    names = {name: name for name in one.starts}
    told = left_out(one, run, names, compared, range(3))
    lines = [line for line in told if "which ones count" in line]
    assert bool(lines) is (count < 6)
    for line in lines:
        assert f"{6 - count} gradients, because ranks of the other side have" in line


def own_scalar(folder: str) -> None:
    torch.manual_seed(0)
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in "abc"})
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def losses() -> Losses:
        for step in range(3):
            own = (1.0 + current_world().rank) ** step
            values = model["a"].sum() + model["b"].sum()
            yield values + own * model["c"].square().sum()
            optimizer.step()

    record(Path(folder), losses(), steps=(0, 3))


def test_one_weight_that_nobody_sums_is_not_averaged(
    two: Cluster, tmp_path: Path
) -> None:
    two.run(own_scalar, str(tmp_path))
    run = read_merged(tmp_path)
    assert run.early == ()
    assert (3, "weight", "c") in run.replicas


class Sharp(torch.optim.SGD):
    """Optimizer that computes gradients at other weights, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p += 1
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                p.copy_(old)
        return super().step()


def test_weights_are_those_before_a_closure_moves_them(tmp_path: Path) -> None:
    def losses(optimizer_class: type[torch.optim.SGD]) -> Losses:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = optimizer_class(model.parameters(), 0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(rows(0)).square().sum()
            loss.backward()
            return loss

        yield model(rows(0)).square().sum()
        optimizer.step(closure)

    sharp, plain = (
        recorded(tmp_path / each.__name__, losses(each), steps=(0, 1))
        for each in (Sharp, torch.optim.SGD)
    )
    for kind, is_equal in (("weight", True), ("gradient", False)):
        key = 0, kind, "weight"
        assert (sharp.tensors[key].digest == plain.tensors[key].digest) == is_equal


@pytest.mark.parametrize(("most", "count"), [(1, 1), (4, 4)])
def test_evaluations_of_a_closure_are_counted(
    tmp_path: Path, most: int, count: int
) -> None:
    def losses() -> Losses:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=most)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(rows(0)).exp().sum()
            loss.backward()
            return loss

        yield model(rows(0)).sum()
        optimizer.step(closure)

    assert recorded(tmp_path, losses(), steps=(0, 1)).evaluations == {0: count}


def test_a_step_of_zeros_before_any_forward_only_makes_states(tmp_path: Path) -> None:
    """Megatron-FSDP steps once with zero gradients, which does not count as a step."""
    counts = []
    for size in (0.0, 1.0):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def losses(
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            size: float = size,
        ) -> Losses:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, size)
            optimizer.step()
            for step in range(2):
                optimizer.zero_grad()
                yield model(rows(step)).square().sum()
                optimizer.step()

        run = recorded(tmp_path / str(size), losses(), steps=(0, 2))
        counts.append(len(run.rows))
    assert counts == [2, 1]


class OfShares(torch.optim.Optimizer):
    """Optimizer with an inner one for each share, like ZeroRedundancyOptimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        every = [*parameters]
        super().__init__(every, {"lr": 0.1})
        self.shares = [torch.optim.AdamW([each], lr=0.1) for each in every]

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        for share in self.shares:
            share.step()


def test_a_step_within_a_step_is_a_part_of_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = OfShares(model.parameters())

    def losses() -> Losses:
        yield model(rows(0)).square().sum()
        optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 1))
    assert (
        {*run.names("gradient", 0)} == {*run.names("update", 0)} == {"weight", "bias"}
    )
    assert run.unstepped == () and run.notes == () and run.outputs == {"float32"}


def test_a_job_in_bf16_begins_with_the_rounded_weights_of_one_in_fp32(
    tmp_path: Path,
) -> None:
    """The weights of each optimizer are compared before its own first step."""
    runs = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(dtype)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in model]

        def losses(
            model: nn.Module = model,
            optimizers: list[torch.optim.SGD] = optimizers,
            dtype: torch.dtype = dtype,
        ) -> Losses:
            for step in range(2):
                yield model(rows(step).to(dtype)).square().sum()
                for optimizer in optimizers:
                    optimizer.step()

        runs.append(recorded(tmp_path / str(dtype), losses(), steps=(0, 2)))
    names, told = proved_names(*runs)
    assert len(names) == 4 and "4 of them after rounding to bf16" in told


def test_the_default_device_of_the_job_does_not_matter(tmp_path: Path) -> None:
    """The recorder's own numbers are on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    inputs = [rows(step) for step in range(2)]

    def losses() -> Losses:
        with torch.device("meta"):
            for each in inputs:
                optimizer.zero_grad()
                yield model(each).sum()
                optimizer.step()

    run = recorded(tmp_path, losses(), steps=(0, 2), nudge=1)
    assert run.steps == [0, 1] and run.notes == ()
    assert len(run.names("gradient", 1)) == 6
