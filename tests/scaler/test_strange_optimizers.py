"""Strange optimizers and subclasses: both classes of torch beside ours, call by call.

One table of optimizers, one of subclasses. Each is run over good and overflowing
gradients, by torch's class and by ours; every call must return or raise the same, and
leave the same weights, gradients, scale and state.
"""

import functools
from collections import ChainMap, OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from gradparity.tests.beside_torch import (
    PAIRS,
    Pair,
    bits,
    ours_plain,
    ours_sharded,
    outcome,
    scaled_once,
    torch_plain,
    torch_sharded,
)
from gradparity.tests.scaler.optimizers import (
    Delegating,
    Duck,
    Fused,
    Group,
    Refusing,
    Slotted,
    TakesScaler,
    Unhashable,
    Wrapper,
    knows_its_wrapper,
    move,
)

INF, NAN = float("inf"), float("nan")
GRADIENTS = (2.0, INF, 4.0, NAN, 1.0, 2.0)

# - Optimizers


class EqualToAll(Duck):
    """Compares equal to every object."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class NoTruth(Duck):
    """Optimizer whose ``bool`` and ``len`` raise."""

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")

    def __len__(self) -> int:
        raise RuntimeError("of no length")


class FreshGroups(Duck):
    """Optimizer that creates new groups each time ``param_groups`` is read."""

    def __init__(self, *params: Any) -> None:
        self.held = params

    @property
    def param_groups(self) -> Any:
        return [{"params": list(self.held)}]


def grouped(make_group: Callable[[Any], Any], kind: Any = Duck) -> Any:
    def make(*params: Any) -> Any:
        optimizer = kind(*params)
        optimizer.param_groups = make_group(list(params))
        return optimizer

    return make


def known_by_inner(*params: Any) -> Any:
    return knows_its_wrapper(Duck(*params))


def wraps(*params: Any) -> Any:
    return Wrapper(Duck(*params))


def wraps_twice(*params: Any) -> Any:
    return Wrapper(Delegating(Wrapper(Duck(*params))))


def delegates(*params: Any) -> Any:
    return Delegating(torch.optim.SGD(list(params), lr=1.0))


def knows_wrapper(*params: Any) -> Any:
    return known_by_inner(*params).optimizer


def knows_itself(*params: Any) -> Any:
    optimizer: Any = Duck(*params)
    optimizer.me = optimizer
    return optimizer


def ring(*params: Any) -> Any:
    links: list[Any] = [Duck(*params) for _ in range(3)]
    for link, following in zip(links, links[1:] + links[:1], strict=True):
        link.following, link.param_groups = following, links[0].param_groups
    return links[0]


def refuses(error: Exception) -> Any:
    def make(*params: Any) -> Any:
        optimizer: Any = Duck(*params)
        optimizer.other = Refusing(error)
        return optimizer

    return make


def same_groups_elsewhere(*params: Any) -> Any:
    """Return an optimizer; one of its attributes has the same groups, but no step."""
    optimizer: Any = Duck(*params)
    optimizer.view = type("View", (), {"param_groups": optimizer.param_groups})()
    return optimizer


def fused_with(state: Any, **settings: Any) -> Any:
    def make(*params: Any) -> Any:
        optimizer: Any = Fused(*params)
        optimizer.param_groups[0].update(settings)
        if state is not None:
            optimizer.state = state(params)
        return optimizer

    return make


class Reluctant(Duck):
    """Optimizer whose ``_step_supports_amp_scaling`` raises AttributeError."""

    @property
    def _step_supports_amp_scaling(self) -> Any:
        raise AttributeError("not said")


class Zero(Duck):
    """Optimizer whose ``_step_supports_amp_scaling`` is 0."""

    _step_supports_amp_scaling = 0


class TakesScalerAndUnscales(Duck):
    """Fused optimizer of the old contract, which makes the scaler divide."""

    _step_supports_amp_scaling = True

    def step(self, grad_scaler: Any = None) -> Any:
        if not grad_scaler._found_inf_per_device(self):
            grad_scaler.unscale_(self)
        found = grad_scaler._found_inf_per_device(self).values()
        return None if any(map(float, found)) else move(self)


class Called:
    """Callable object that serves as a ``step`` method."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __call__(self) -> Any:
        return move(self.optimizer)


def step_is_an_object(*params: Any) -> Any:
    optimizer: Any = Duck(*params)
    optimizer.step = Called(optimizer)
    return optimizer


def step_is_partial(*params: Any) -> Any:
    optimizer: Any = Fused(*params)
    optimizer.step = functools.partial(Fused.step, optimizer)
    return optimizer


def step_has_no_signature(*params: Any) -> Any:
    optimizer: Any = Fused(*params)
    optimizer.step = max  # a builtin
    return optimizer


class SlottedFused:
    """Fused optimizer with slots, so without ``grad_scale`` and ``found_inf``."""

    __slots__ = ("param_groups",)
    _step_supports_amp_scaling = True

    def __init__(self, *params: Any) -> None:
        self.param_groups = [{"params": list(params)}]

    def step(self) -> str:
        return move(self)


def without_groups(*_: Any) -> Any:
    return grouped(lambda _: [])()


def sgd(**settings: Any) -> Any:
    return lambda *params: torch.optim.SGD(list(params), lr=1.0, **settings)


class Pickier(torch.optim.SGD):
    """torch's SGD with positional arguments and a step that returns a dict."""

    def __init__(self, *params: Any) -> None:
        super().__init__(list(params), lr=1.0)

    def step(self, closure: Any = None) -> Any:
        super().step()
        return {"lr": 1.0}


PLAIN_ONES: dict[str, Any] = {
    "torch": sgd(),
    "torch, its subclass": Pickier,
    "duck": Duck,
    "slots": Slotted,
    "unhashable": Unhashable,
    "equal to all": EqualToAll,
    "no truth": NoTruth,
    "fresh groups": FreshGroups,
    "groups in a tuple": grouped(lambda params: ({"params": params},)),
    "params in a tuple": grouped(lambda params: [{"params": tuple(params)}]),
    "params as keys": grouped(lambda params: [{"params": dict.fromkeys(params)}]),
    "groups with []": grouped(lambda params: [Group(params)]),
    "UserDict": grouped(lambda params: [UserDict(params=params)]),
    "ChainMap": grouped(lambda params: [ChainMap({}, {"params": params})]),
    "OrderedDict": grouped(lambda params: [OrderedDict(params=params)]),
    "proxy": grouped(lambda params: [MappingProxyType({"params": params})]),
    "empty group": grouped(lambda params: [{"params": []}, {"params": params}]),
    "no group": without_groups,
    "a wrapper": wraps,
    "wrapped twice": wraps_twice,
    "delegates": delegates,
    "known by its inner one": known_by_inner,
    "knows its wrapper": knows_wrapper,
    "knows itself": knows_itself,
    "ring": ring,
    "attribute raises RuntimeError": refuses(RuntimeError("not yet")),
    "attribute raises AttributeError": refuses(AttributeError("not there")),
    "attribute raises KeyError": refuses(KeyError("no groups")),
    "the same groups elsewhere": same_groups_elsewhere,
    "reluctant": Reluctant,
    "zero": Zero,
    "step is an object": step_is_an_object,
    "groups without params": grouped(lambda params: [{"weights": params}]),
    "no groups at all": lambda *_: object(),
    "none": lambda *_: None,
}
FUSED_ONES: dict[str, Any] = {
    "torch, fused": sgd(fused=True),
    "torch, fused, momentum": sgd(fused=True, momentum=0.5),
    "fused": Fused,
    "fused, groups with []": grouped(lambda params: [Group(params)], Fused),
    "momentum, no state": fused_with(None, momentum=0.5),
    "momentum, an int": fused_with(lambda _: {"steps": 3}, momentum=0.5),
    "momentum, None": fused_with(lambda _: {"steps": None}, momentum=0.5),
    "momentum, a list": fused_with(lambda _: [1, 2], momentum=0.5),
    "momentum, by parameter": fused_with(
        lambda params: defaultdict(dict, {p: {"step": 1} for p in params}), momentum=0.5
    ),
    "momentum, a tensor": fused_with(lambda _: {"m": torch.ones(2)}, momentum=0.5),
    "momentum that is a tensor": fused_with(
        lambda _: {}, momentum=torch.full((2,), 0.5)
    ),
    "state is None": fused_with(lambda _: None),
    "takes the scaler": TakesScaler,
    "takes the scaler, unscales": TakesScalerAndUnscales,
    "step is partial": step_is_partial,
    "step has no signature": step_has_no_signature,
    "slots, fused": SlottedFused,
}


def run(make_scaler: Any, make: Any, explicit: bool) -> list[Any]:
    """Return the visible results of a program, call by call."""
    scaler = scaled_once(make_scaler(init_scale=4.0, growth_interval=2))
    p = nn.Parameter(torch.ones(1))
    idle = nn.Parameter(torch.ones(1))
    optimizer, seen = make(p, idle), []
    for gradient in GRADIENTS:
        p.grad = torch.tensor([gradient])
        if explicit:
            seen.append(outcome(scaler.unscale_, optimizer))
        seen.append(bits(p.grad))
        seen.append(outcome(scaler.step, optimizer))
        if isinstance(seen[-1], str) and seen[-1] != "stepped":
            return [*seen, bits(p)]  # what is left after an error is not torch's
        state = scaler._per_optimizer_states[id(optimizer)]
        found = state["found_inf_per_device"].values()
        seen.append((state["stage"].name, any(map(float, found))))
        seen.append(outcome(scaler.update))
        seen.append((bits(p), scaler.get_scale(), scaler._get_growth_tracker()))
    return seen


EXPLICIT = pytest.mark.parametrize("explicit", [False, True])


@PAIRS
@EXPLICIT
@pytest.mark.parametrize("name", PLAIN_ONES)
def test_an_optimizer_beside_torch(pair: Pair, explicit: bool, name: str) -> None:
    make = PLAIN_ONES[name]
    assert run(pair.ours, make, explicit) == run(pair.theirs, make, explicit)


@EXPLICIT
@pytest.mark.parametrize("ours", [ours_plain, ours_sharded])
@pytest.mark.parametrize("name", FUSED_ONES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_fused_optimizer_beside_torch(ours: Any, explicit: bool, name: str) -> None:
    """Our classes are compared with torch's plain class; the sharded one is wrong."""
    make = FUSED_ONES[name]
    assert run(ours, make, explicit) == run(torch_plain, make, explicit)


# - Subclasses of the scaler


class ForwardsUnscale:
    """Overrides ``_unscale_grads_`` without changing it."""

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        return super()._unscale_grads_(*args, **kwargs)  # type: ignore[misc]


class UnscalesByHand:
    """Overrides ``_unscale_grads_`` by its own division."""

    shape: tuple[int, ...] = ()

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, *_: Any) -> Any:
        bad = 0.0
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    bad = max(bad, float(not p.grad.isfinite().all()))
                    p.grad.mul_(inv_scale)
        return {torch.device("cpu"): torch.full(self.shape, bad)}


class UnscalesInShapeOne(UnscalesByHand):
    """Returns found_inf in shape (1,), as torch's sharded class does."""

    shape = (1,)


class FindsNothing:
    """Returns an empty found_inf."""

    def _unscale_grads_(self, *_: Any) -> Any:
        return {}


class NeverSkips:
    """Steps after an overflow as well."""

    def _maybe_opt_step(self, optimizer: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


class SumsItself:
    """Overrides ``_maybe_opt_step`` by a copy of torch's."""

    def _maybe_opt_step(self, optimizer: Any, state: Any, *args: Any) -> Any:
        if not sum(v.item() for v in state["found_inf_per_device"].values()):
            return optimizer.step(*args)
        return None


class AlwaysFinds:
    """Sets found_inf to 1 in place before every step."""

    def _maybe_opt_step(self, optimizer: Any, state: Any, *args: Any) -> Any:
        for found in state["found_inf_per_device"].values():
            found.fill_(1.0)
        return super()._maybe_opt_step(optimizer, state, *args)  # type: ignore[misc]


class TorchStates:
    """Replaces the dictionary of states by torch's after each iteration."""

    _per_optimizer_states: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)  # type: ignore[misc]
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


class OverridesUnscale:
    """Overrides ``unscale_`` to count its calls."""

    calls = 0

    def unscale_(self, optimizer: Any) -> None:
        self.calls += 1
        super().unscale_(optimizer)  # type: ignore[misc]


class StepsByHand:
    """Overrides ``step`` by public calls, as trainers do."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._per_optimizer_states[id(optimizer)]  # type: ignore[attr-defined]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)  # type: ignore[attr-defined]
        state = self._per_optimizer_states[id(optimizer)]  # type: ignore[attr-defined]
        found = state["found_inf_per_device"].values()
        state["stage"] = OptState.STEPPED
        return None if any(map(float, found)) else optimizer.step(*args, **kwargs)


class MakesItsScale:
    """Overrides the creation of the scale, and replaces it by a copy."""

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        super()._lazy_init_scale_growth_tracker(dev)  # type: ignore[misc]
        self._scale: Any = self.__dict__["_scale"].clone()


class ScaleIsSet:
    """Sets a scale tensor before each step."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._scale = torch.full((), 8.0)
        return super().step(optimizer, *args, **kwargs)  # type: ignore[misc]


class OverridesCheck:
    """Overrides ``_check_inf_per_device`` without changing it."""

    def _check_inf_per_device(self, optimizer: Any) -> Any:
        return super()._check_inf_per_device(optimizer)  # type: ignore[misc]


class UnscaleRaises:
    """Overrides ``_unscale_grads_``; the second call raises."""

    calls = 0

    def _unscale_grads_(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("cannot be read")
        return super()._unscale_grads_(*args)  # type: ignore[misc]


MIXINS: list[type] = [
    ForwardsUnscale,
    UnscalesByHand,
    UnscalesInShapeOne,
    FindsNothing,
    NeverSkips,
    SumsItself,
    AlwaysFinds,
    TorchStates,
    OverridesUnscale,
    StepsByHand,
    MakesItsScale,
    ScaleIsSet,
    OverridesCheck,
    UnscaleRaises,
]


def mixed(make: Any, mixin: type) -> Any:
    """Return a function that makes scalers of a subclass with ``mixin`` first."""

    def made(**settings: Any) -> Any:
        scaler = make()
        kind = type(mixin.__name__, (mixin, type(scaler)), {})
        group = getattr(scaler, "process_group", None)
        if group is not None:
            settings["process_group"] = group
        return kind("cpu", **settings)

    return made


@EXPLICIT
@pytest.mark.parametrize("mixin", MIXINS)
@pytest.mark.parametrize(
    ("pair", "fused"),
    [
        (Pair(torch_plain, ours_plain), False),
        (Pair(torch_plain, ours_plain), True),
        (Pair(torch_sharded, ours_sharded), False),
        (Pair(torch_plain, ours_sharded), True),  # B02, B09
    ],
    ids=["plain", "plain-fused", "sharded", "sharded-fused"],
)
def test_a_subclass_beside_torch(
    pair: Pair, fused: bool, mixin: type, explicit: bool
) -> None:
    theirs, ours = mixed(pair.theirs, mixin), mixed(pair.ours, mixin)
    make = sgd(fused=fused)
    assert run(ours, make, explicit) == run(theirs, make, explicit)
