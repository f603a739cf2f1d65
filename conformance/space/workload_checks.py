"""Check a user's workload on one process, before any rank starts.

A failed check ends the command with exit code 2. Each call must give the same model and
batches. Forward must be deterministic with random layers off. The loss must be a mean
over rows, or a sum with its count. The optimizer must accept all parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...fixtures import (
    OWN,
    REFERENCE_LINE,
    Batch,
    Counts,
    OfWorkload,
    ResolvedWorkload,
    WorkloadError,
    compared_parameters,
    resolve_workload,
)
from ..formulas import FP32_INSIDE
from ..record.parts import has_plain_bits
from ..record.reading import states_of_generators
from .facts import (
    facts_of,
    new_tensors_in_fp64,
    objective_of,
    seeded_model,
    wide,
)
from .random_layers import equal_outputs, generators_of
from .scenario import Scenario

__all__ = [
    "PARTS",
    "ROUNDING",
    "check_workload",
    "check_workloads",
    "coarseness",
    "counts_alike",
    "counts_equal",
    "listed",
    "steps_alike",
]

MAX_ELEMENTS = 2**24
"""Largest number of elements of a parameter, because they are numbered in fp32."""
PARTS = 4
"""Number of parts of a batch in the check that parts make up the whole."""
ROUNDING = 2.0**-30
"""Relative tolerance. In fp64 (unit roundoff 2^-53) a sum of 2^20 values is off by
2^-33 in the worst case, and a loss sums a few times. A loss that is not a mean is off
by its own size divided by the number of rows."""


def check_workloads(scenarios: Iterable[Scenario]) -> None:
    """Check each user's workload among the scenarios once.

    Raises:
        WorkloadError: names the call, its result, and what was expected.
    """
    for name in dict.fromkeys(s.model for s in scenarios):
        if OfWorkload.OF_USER in resolve_workload(name).has:
            check_workload(name)


@cache
def check_workload(spec: str) -> None:
    """Check one workload on this process; the module docstring lists the checks.

    Raises:
        WorkloadError: names the call, its result, and what was expected.
    """
    workload = resolve_workload(spec)
    model, batch = _model(workload), _batch(workload)
    if workload.one_rank:  # the other checks are about what the plain reference needs
        return
    # its backward makes the gradients that are checked below
    _check_loss(workload, model, batch)
    _check_gradients(workload, model)
    _check_mean(workload, model, batch)
    _check_optimizer(workload, model)


def _model(workload: ResolvedWorkload) -> nn.Module:
    # made twice, because ranks and references make it separately and need equal values
    model, again = (seeded_model(workload) for _ in range(2))
    if not isinstance(model, nn.Module):
        raise workload.refuse(
            "model", f"returned {type(model).__name__}, expected a module"
        )
    twins = dict(again.named_parameters())
    for name, parameter in compared_parameters(model).items():
        if is_lazy(parameter):
            raise workload.refuse(
                "model",
                f"{name} has no shape yet: call the lazy model once on inputs of "
                "batch() before it is returned",
            )
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            got = f"{parameter.dtype} on {parameter.device}"
            pair = "; keep its real and imaginary parts, and let forward join them"
            way = pair if parameter.is_complex() else ""
            raise workload.refuse(
                "model", f"{name} is {got}, expected torch.float32 on cpu{way}"
            )
        if parameter.numel() >= MAX_ELEMENTS:
            has = f"{name} has {parameter.numel()} elements, at most {MAX_ELEMENTS - 1}"
            raise workload.refuse("model", f"{has} are allowed: make it smaller")
        if name not in twins or not _same_bits(parameter, twins[name]):
            raise workload.refuse(
                "model",
                f"{name} has other values when made again: after the same "
                "torch.manual_seed the model must be the same",
            )
    for name, buffer in model.named_buffers():
        if buffer.device.type != "cpu":
            text = f"the buffer {name} is on {buffer.device}, expected cpu"
            way = ": give it its values" if buffer.is_meta else ""
            raise workload.refuse("model", text + way)
    if not any(p.requires_grad for p in model.parameters()):
        raise workload.refuse("model", "has no parameter that trains")
    return model


def _batch_after(workload: ResolvedWorkload, seed: int) -> Batch:
    """Return the first batch, created after torch's generator was seeded.

    Ranks and references call ``batch`` with different states of the generator.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return workload.batch(0, 0)


def _batch(workload: ResolvedWorkload) -> Batch:
    batch, again = (_batch_after(workload, state) for state in range(2))
    for tensor in batch.tensors:
        if not has_plain_bits(tensor):
            raise workload.refuse(
                "batch",
                f"has a tensor of type {type(tensor).__name__} and layout "
                f"{tensor.layout}, expected dense numbers of torch.Tensor: return "
                "to_dense() or padded rows, and let forward convert them",
            )
    if not all(map(_same_bits, batch.tensors, again.tensors)):
        raise workload.refuse(
            "batch",
            "gave other numbers for the same step and seed: draw them from a generator "
            "seeded with both",
        )
    for name, topology in workload.topologies.items():
        shares = topology.shares(topology.default_world_size)
        if workload.shard is None and batch.rows % shares:
            raise workload.refuse(
                "batch",
                f"has {batch.rows} rows, which {shares} does not divide: so "
                f"many ranks of {name} see different rows; write shard(batch, mesh) "
                "where they are not split equally",
            )
        if shares == 1 or workload.shard is not None:
            continue
        if _are_equal([batch.shard(i, shares) for i in range(shares)]):
            raise workload.refuse(
                "batch",
                f"has equal rows for all {shares} ranks of {name} that should see "
                "different ones, so training that reduces no gradient would pass: "
                "draw other numbers for each row",
            )
    return batch


def _are_equal(parts: list[Batch]) -> bool:
    """Return True if all parts hold the same numbers."""
    first, *others = parts
    return all(all(map(_same_bits, first.tensors, part.tensors)) for part in others)


def _check_loss(workload: ResolvedWorkload, model: nn.Module, batch: Batch) -> None:
    before = {
        name: buffer.detach().clone()
        for name, buffer in model.named_buffers()
        if has_plain_bits(buffer)
    }
    states = _generators(model)
    value, counts = objective_of(workload, model, [batch])
    drew = not all(map(torch.equal, states, _generators(model)))
    now = dict(model.named_buffers())
    moved = [n for n, b in before.items() if n in now and not _same_bits(b, now[n])]
    again = objective_of(workload, model, [batch])
    if not bool(torch.isfinite(value)):
        raise workload.refuse("loss", f"is {value.item()} on the first batch")
    if 0 in counts:
        raise workload.refuse("loss", "the count of the whole first batch is 0")
    if (value.item(), counts) != (again[0].item(), again[1]):
        losses = f"gave the losses {value.item():.9g} and {again[0].item():.9g}"
        depends = (
            "a forward that uses what earlier ones left depends on how a batch is "
            "split, and cannot be compared."
        )
        if moved:
            raise workload.refuse(
                "forward",
                f"{losses} for one batch, and changed the buffers {', '.join(moved)}: "
                f"{depends} Let forward not change them, for example by eval() of that "
                f"layer in model(), or, {REFERENCE_LINE}",
            )
        if not drew:
            raise workload.refuse(
                "forward",
                f"{losses} for one batch, and drew no random numbers. "
                f"{_where_random(workload, model, batch)}. An attribute may hold a "
                f"state: {depends} Begin each forward anew, or, {REFERENCE_LINE}",
            )
        raise _random_forward(workload, model, batch, losses)
    if not value.requires_grad:
        raise workload.refuse("loss", "is not connected with any parameter")
    with workload.calling("backward"):
        value.backward()


def _generators(model: nn.Module) -> list[Tensor]:
    """Return the states of the generators that a forward may draw from."""
    own = (g for module in model.modules() for g in generators_of(module))
    states = states_of_generators(torch.device("cpu"))
    return [*states, *(generator.get_state() for generator in own)]


def _random_forward(
    workload: ResolvedWorkload, model: nn.Module, batch: Batch, losses: str
) -> WorkloadError:
    return workload.refuse(
        "forward",
        f"{losses} for one batch, and a random forward cannot be compared. "
        f"{_where_random(workload, model, batch)}. gradparity turns off torch's "
        "dropouts and numbers from 0 to 1 that are attributes of modules or their "
        "classes with 'drop' or 'jitter' in their names. Keep the size of other noise "
        "in such an attribute, not in a config, and draw nothing where it is 0",
    )


def _where_random(workload: ResolvedWorkload, model: nn.Module, batch: Batch) -> str:
    """Describe the first module whose output differs in two forwards of one batch."""
    first, second = (_calls(workload, model, batch) for _ in range(2))
    for (name, output), (other, again) in zip(first, second, strict=False):
        if name != other:
            return f"One forward calls {name}, another one {other} in its place"
        if not equal_outputs(output, again):
            return f"{name} is the first whose output differs: look there and before it"
    return "Two more forwards were equal"


def _calls(
    workload: ResolvedWorkload, model: nn.Module, batch: Batch
) -> list[tuple[str, Any]]:
    """Return the modules that a forward calls, with their outputs."""
    calls: list[tuple[str, Any]] = []
    hooks = []
    for name, module in model.named_modules():
        label = f"{name or 'the model'} ({type(module).__name__})"
        hooks.append(
            module.register_forward_hook(
                lambda _, __, output, label=label: calls.append((label, output))
            )
        )
    with workload.calling("forward"):
        model(batch.inputs)
    for hook in hooks:
        hook.remove()
    return calls


def _check_gradients(workload: ResolvedWorkload, model: nn.Module) -> None:
    """Check that gradients are dense, and that at least one is not zero.

    A few parameters may be unused.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    for name, parameter in named:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise workload.refuse(
                "model",
                f"{name} gets a gradient of layout {parameter.grad.layout}, which "
                "cannot be compared: expected a dense one (sparse=False)",
            )
    if all(p.grad is None or not p.grad.any() for _, p in named):
        text = f"gave no gradient but zero to any of {', '.join(n for n, _ in named)}"
        raise workload.refuse("backward", text)
    model.zero_grad()


def _check_mean(workload: ResolvedWorkload, model: nn.Module, batch: Batch) -> None:
    """Check that the losses of parts combine to the loss of the whole batch."""
    # in fp64, where rounding cannot hide a loss that is no mean
    whole = wide(batch)
    model = model.double()
    own = workload.micro_batches
    if own is not None:
        parts = own(whole)
        elements = sum(part.elements for part in parts)
        if not facts_of(workload.name).counted and elements != whole.elements:
            raise workload.refuse(
                "micro_batches",
                f"leave out rows or repeat them: together they have {elements} "
                f"elements of the targets, the batch has {whole.elements}; where "
                "some are padding, let the loss be (sum, count)",
            )
        # otherwise the loss is defined by these parts, whatever it is
        if not _same_parts(workload, whole, parts):
            _check_made_up(workload, model, whole, parts, "micro_batches")
    else:
        _check_made_up(workload, model, whole, whole.in_parts(PARTS), "loss")
    model.float()


def _same_parts(workload: ResolvedWorkload, whole: Batch, parts: list[Batch]) -> bool:
    """Return True if cutting the ranks' shares gives the same parts as the batch.

    If so, the objective is the mean over these parts, whatever the layout. The loss of
    a part may then depend on all of its rows: batch statistics, a balance of experts,
    pairs.
    """
    if workload.shard is not None or len(parts) == 1:
        return False
    cut = workload.micro_batches
    assert cut is not None
    for topology in workload.topologies.values():
        count = topology.shares(topology.default_world_size)
        theirs = [p for i in range(count) for p in cut(whole.shard(i, count))]
        same = len(theirs) == len(parts) and all(
            len(one.tensors) == len(other.tensors)
            and all(map(_same_bits, one.tensors, other.tensors))
            for one, other in zip(parts, theirs, strict=True)
        )
        if not same:
            return False
    return True


def _check_made_up(
    workload: ResolvedWorkload,
    model: nn.Module,
    whole: Batch,
    parts: list[Batch],
    call: str,
) -> None:
    try:
        with new_tensors_in_fp64(workload.name):
            value, counts = objective_of(workload, model, [whole])
            joined, of_parts = objective_of(workload, model, parts)
    except WorkloadError as error:
        raise workload.refuse(
            error.call,
            f"{error.text}. This happens in fp64 alone, in which the reference trains: "
            "make new tensors in the dtype of the inputs or of the parameters",
        ) from error
    largest = max(abs(value.item()), abs(joined.item()))
    # with logits.float() before the cross entropy, the loss is a mean up to fp32
    rounding = ROUNDING if value.dtype == torch.float64 else FP32_INSIDE
    if workload.rounds_to is not None:
        rounding = max(rounding, coarseness(workload.rounds_to))
    rounding *= largest * (len(parts) if counts else 1)
    adds_up = counts_equal(counts, of_parts)
    if adds_up and abs(value - joined) <= rounding:
        return
    with new_tensors_in_fp64(workload.name):
        again, _ = objective_of(workload, model, [whole])
    if again.item() != value.item():
        losses = f"gave the losses {value.item():g} and {again.item():g}"
        raise _random_forward(workload, model, whole, losses)
    if counts:
        raise workload.refuse(
            call,
            f"sum / count is {value.item():.9g} for the batch (counts "
            f"{listed(counts)}) and {joined.item():.9g} for its {len(parts)} parts "
            f"together (counts {listed(of_parts)}), in fp64: sums and counts of parts "
            "must add up",
        )
    way = f"If a train_step gathers what it needs of other ranks, {REFERENCE_LINE}"
    if abs(value - joined) < coarseness(torch.float8_e4m3fn) * largest:
        way = (
            "If the model rounds to 8 bits by a scale that all rows share, declare "
            "rounds_to = torch.float8_e4m3fn"
        )
    raise workload.refuse(
        call,
        f"is {value.item():.9g} for the batch and {joined.item():.9g} on average "
        f"over its {len(parts)} parts, in fp64: data parallel training averages "
        "over rows, so the loss must be a mean over them (no sum, no batch norm, "
        "no fp32 inside the model), or (sum, count). If it couples rows on "
        "purpose, cut the batch in micro_batches: parts of fixed rows, which are "
        f"the same for the whole batch and for the shares of the ranks. {way}",
    )


def counts_alike(workload: ResolvedWorkload) -> bool:
    """Return True if the loss is (sum, count), and parts of a batch have equal counts.

    Then a loss that each rank divides by its own count is right.
    """
    if not facts_of(workload.name).counted or workload.one_rank:
        return False
    model, parts = seeded_model(workload), _batch(workload).in_parts(PARTS)
    with suppress(WorkloadError):
        counts = [objective_of(workload, model, [part])[1] for part in parts]
        return len(counts) > 1 and all(each == counts[0] for each in counts)
    return False


def steps_alike(workload: ResolvedWorkload) -> bool:
    """Return True if the batches of two steps are equal."""
    with suppress(WorkloadError):
        return _are_equal([workload.batch(step, 0) for step in (0, 1)])
    return False


def coarseness(dtype: torch.dtype) -> float:
    """Return the largest relative change of a number that is rounded to 8 bits.

    The factor with which a row is rounded may depend on other rows of the batch. So
    even a correct mean over rows may change when the batch is cut, but by less than
    this.
    """
    if dtype.is_floating_point:
        return torch.finfo(dtype).eps / 2
    return 0.5 / torch.iinfo(dtype).max


def counts_equal(one: Counts, other: Counts) -> bool:
    """Return True if two sums of the same counts are equal; integers exactly.

    Sums of weights (of classes, of tokens) depend on the order of addition, and may be
    in fp32, so they may differ by rounding.
    """
    return len(one) == len(other) and all(map(_count_equal, one, other))


def _count_equal(one: float, other: float) -> bool:
    if one == int(one) and other == int(other):
        return one == other
    return abs(one - other) <= FP32_INSIDE * max(one, other)


def listed(counts: Counts) -> str:
    """Return counts as text."""
    return " and ".join(f"{count:g}" for count in counts) or "none"


def _check_optimizer(workload: ResolvedWorkload, model: nn.Module) -> None:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    # with all parameters and with one, as the reference makes an optimizer for each
    for pairs in (named, named[:1]):
        for make in workload.optimizers.values():
            optimizer = (
                make(pairs) if pairs is named else _made_alone(workload, make, pairs)
            )
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise workload.refuse(
                    "optimizer",
                    f"returned {type(optimizer).__name__}, expected torch's Optimizer: "
                    "let the class inherit torch.optim.Optimizer and call "
                    "super().__init__(parameters, defaults), also if it wraps another "
                    "optimizer",
                )
            _check_step(workload, optimizer)
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            lost = [n for n, p in pairs if id(p) not in ids]
            if lost:
                raise workload.refuse(
                    "optimizer", f"was given {lost[0]} and left it out"
                )
    _check_alone(workload, named)


def _check_step(workload: ResolvedWorkload, made: torch.optim.Optimizer) -> None:
    """Check that an optimizer's ``step`` needs no argument."""
    arguments = inspect.signature(made.step).parameters.values()
    needed = [a.name for a in arguments if a.default is a.empty and a.kind in _BY_PLACE]
    if needed:
        raise workload.refuse(
            "optimizer",
            f"{type(made).__name__}.step() needs {needed[0]!r}: an optimizer that "
            "evaluates the loss again has no single gradient to compare. Let a "
            "train_step step it; "
            f"{REFERENCE_LINE}",
        )


_BY_PLACE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def _made_alone(
    workload: ResolvedWorkload, make: Callable[[Any], Any], some: Any
) -> Any:
    try:
        return make(some)
    except WorkloadError as error:
        text = f"with {some[0][0]} alone it {error.text}"
        raise workload.refuse(
            "optimizer",
            f"{text}; the reference has an optimizer for each parameter, so leave out "
            "groups and optimizers that would be empty",
        ) from error


def _check_alone(
    workload: ResolvedWorkload, named: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Check that an optimizer moves a parameter the same with and without others."""
    generator = torch.Generator().manual_seed(0)
    sizes = {name: p.shape for name, p in named}
    steps = [
        {
            name: torch.randn(size, generator=generator, dtype=torch.float64)
            for name, size in sizes.items()
        }
        for _ in range(2)
    ]

    drew, seen, takes_hooks = False, 0, True
    settings: dict[str, dict[str, Any]] = {}  # of the last optimizer, by name

    def moved(names: Iterable[str]) -> dict[str, Tensor]:
        nonlocal drew, seen, settings, takes_hooks

        def see(*_: Any) -> None:
            nonlocal seen
            seen += 1

        chosen = {
            n: nn.Parameter(torch.ones(sizes[n], dtype=torch.float64)) for n in names
        }
        eager = torch.compiler.set_stance("force_eager")  # references run eagerly, too
        with workload.calling("optimizer"), eager, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            optimizer = workload.optimizers[OWN]([*chosen.items()])
            try:
                optimizer.register_step_pre_hook(see)
            except AttributeError:  # the optimizer may not be one of torch
                pass
            except TypeError:  # a wrapper may have plain dicts as tables of hooks
                takes_hooks = False
            settings = _settings(optimizer, chosen)
            for gradients in steps:
                for name, parameter in chosen.items():
                    parameter.grad = gradients[name].clone()
                state = torch.get_rng_state()
                optimizer.step()
                drew |= not torch.equal(state, torch.get_rng_state())
        return {name: p.detach() - 1 for name, p in chosen.items()}

    updates = moved(sizes)
    beside_others = settings
    for name, beside in updates.items():
        if not takes_hooks or (not seen and OfWorkload.LOOP in workload.has):
            raise workload.refuse(
                "optimizer",
                "calls no hooks in step, so gradparity cannot see what it steps with: "
                "its class must call super().__init__(parameters, defaults), also one "
                "that wraps another optimizer and shares its groups",
            )
        if drew:
            raise workload.refuse(
                "optimizer",
                "draws random numbers in step, which depend on the number and the "
                "order of parameters on a rank, so updates cannot be compared. Set "
                "the noise, or the stochastic rounding, to 0",
            )
        off = float((moved([name])[name] - beside).norm())
        if off > ROUNDING * float(beside.norm()):
            others = beside_others[name]
            other_settings = [
                f"{key} {others[key]:g} beside other parameters and {value:g} alone"
                for key, value in settings[name].items()
                if others.get(key, value) != value
            ]
            if other_settings:
                raise workload.refuse(
                    "optimizer",
                    f"gives {name} {', '.join(other_settings)}. The reference has an "
                    "optimizer for each parameter: choose settings by the name of a "
                    "parameter, not by its place or by the number of parameters",
                )
            raise workload.refuse(
                "optimizer",
                f"moves {name} differently when it has other parameters, too, by "
                f"{off / float(beside.norm() or 1):.2g} of the update. The reference "
                "has an optimizer for each parameter, so it lacks what one computes "
                "from all of them (a common norm, an estimate of the step). First "
                "check that parameters share no state by mistake, such as one counter. "
                f"If they share none, let a train_step step it; {REFERENCE_LINE}",
            )


def _settings(
    optimizer: Any, chosen: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Any]]:
    """Return name of a parameter -> numbers and flags of its param group."""
    names = {parameter: name for name, parameter in chosen.items()}
    settings: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    if isinstance(optimizer, torch.optim.Optimizer):  # else of an unknown form
        for group in optimizer.param_groups:
            plain = {k: v for k, v in group.items() if isinstance(v, int | float)}
            for parameter in group["params"]:
                if parameter in names:
                    settings[names[parameter]] = plain
    return settings


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bits = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*bits)
