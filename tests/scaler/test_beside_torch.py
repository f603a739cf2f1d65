"""The same calls on torch's class and on ours: same results, same errors.

In one process, on a CPU. Cases in which the two differ on purpose are listed in
docs/deviations.md, and are not generated here.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import (
    ShardedGradScaler as TorchShardedGradScaler,
)

from gradparity.scaler import GradScaler, ShardedGradScaler
from gradparity.tests.stepping import exchanged

TorchGradScaler: Any = torch.amp.GradScaler


class OneRank:
    """A process group of one rank: every reduction is the identity."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allreduce(self, *_: Any) -> Any:
        class Done:
            def wait(self) -> None:
                pass

        return Done()


class TorchShardedAlone(TorchShardedGradScaler):
    """torch's class in one process, with a fake group of one rank.

    Two known defects are fixed here, so that everything else can be compared: found_inf
    is 0-d (B09), and the scale is updated by the guarded kernel (B05a).
    """

    def __init__(self, **settings: Any) -> None:
        alone: Any = OneRank()
        super().__init__(process_group=alone, **settings)

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._unscale_grads_(*args, **kwargs)
        return {device: flag.reshape(()) for device, flag in found.items()}

    def _amp_update_scale_cpu_(self, found_inf: Any) -> None:
        assert self._scale is not None and self._growth_tracker is not None
        torch._amp_update_scale_(
            self._scale,
            self._growth_tracker,
            found_inf.reshape(()),
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
        )


GRADIENTS = st.sampled_from([1.0, -3.0, 1e-30, float("inf"), float("nan"), None])
INDEX = st.integers(0, 1)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.25, momentum=0.5),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.25, fused=True),
    "adam for-loop": lambda p: torch.optim.Adam(p, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
}


class Side:
    """One scaler with its own two optimizers and three parameters."""

    def __init__(self, make: Any, kinds: tuple[str, str]) -> None:
        self.scaler = make(device="cpu", init_scale=4.0, growth_interval=3)
        self.params = [torch.ones(2, requires_grad=True) for _ in range(3)]
        self.optimizers = [
            OPTIMIZERS[kinds[0]](self.params[:2]),
            OPTIMIZERS[kinds[1]](self.params[2:]),
        ]

    def call(self, act: Callable[["Side"], Any]) -> tuple[str, Any]:
        try:
            return "returned", act(self)
        except Exception as error:
            for optimizer in self.optimizers:  # torch's keeps them: docs/deviations.md
                vars(optimizer).pop("grad_scale", None)
                vars(optimizer).pop("found_inf", None)
            return type(error).__name__, str(error)


class Machine(RuleBasedStateMachine):
    """State machine that makes each call on both scalers, and compares the results."""

    @initialize(
        kinds=st.tuples(*[st.sampled_from(sorted(OPTIMIZERS))] * 2),
        pair=st.sampled_from(
            [
                (TorchGradScaler, GradScaler),
                (TorchGradScaler, ShardedGradScaler),
                (TorchShardedAlone, ShardedGradScaler),
            ]
        ),
    )
    def build(self, kinds: tuple[str, str], pair: tuple[Any, Any]) -> None:
        self.torch, self.ours = Side(pair[0], kinds), Side(pair[1], kinds)
        self.sharded = pair[1] is ShardedGradScaler

    def both(self, act: Callable[[Side], Any]) -> None:
        expected, got = self.torch.call(act), self.ours.call(act)
        assert repr(got) == repr(expected)

    @rule(nest=st.booleans())
    def scale(self, nest: bool) -> None:
        loss = torch.tensor([1.5, 2.0])
        self.both(lambda s: s.scaler.scale([loss, (loss,)] if nest else loss))

    @rule(which=st.integers(0, 2), value=GRADIENTS)
    def gradient(self, which: int, value: float | None) -> None:
        if self.sharded and value is None:
            return  # ShardedGradScaler steps without gradients, see its docstring
        for side in (self.torch, self.ours):
            p = side.params[which]
            p.grad = None if value is None else torch.full_like(p, value)

    def has_gradients(self, which: int) -> bool:
        held = self.ours.optimizers[which].param_groups[0]["params"]
        return any(p.grad is not None for p in held)

    @rule(which=INDEX)
    def unscale(self, which: int) -> None:
        # Without any, torch's class is stuck in its stage: docs/deviations.md.
        if self.has_gradients(which):
            self.both(lambda s: s.scaler.unscale_(s.optimizers[which]))

    @rule(which=INDEX)
    def step(self, which: int) -> None:
        if self.has_gradients(which):
            self.both(lambda s: s.scaler.step(s.optimizers[which]))

    @rule(which=INDEX)
    def closure(self, which: int) -> None:
        self.both(lambda s: s.scaler.step(s.optimizers[which], closure=lambda: 1.0))

    @rule()
    def update(self) -> None:
        self.both(lambda s: s.scaler.update())

    @rule(new=st.sampled_from([0.5, 2.0, 1024.0]), tensor=st.booleans())
    def update_to(self, new: float, tensor: bool) -> None:
        value = torch.tensor(new) if tensor else new
        self.both(lambda s: s.scaler.update(value))

    @rule(factor=st.sampled_from([1.5, 2.0, 4.0]))
    def growth(self, factor: float) -> None:
        self.both(lambda s: s.scaler.set_growth_factor(factor))

    @rule(factor=st.sampled_from([0.25, 0.5]))
    def backoff(self, factor: float) -> None:
        self.both(lambda s: s.scaler.set_backoff_factor(factor))

    @rule(
        copier=st.sampled_from([copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
    )
    def copied(self, copier: Callable[[Any], Any]) -> None:
        def act(side: Side) -> None:
            had_scale = side.scaler._scale is not None
            side.scaler = copier(side.scaler)
            if had_scale:  # ours would do without: see docs/deviations.md
                side.scaler.scale(torch.ones(()))

        self.both(act)

    @rule()
    def exchange_states(self) -> None:
        # Each class reads what the other saved.
        theirs = self.torch.scaler.state_dict()
        mine = self.ours.scaler.state_dict()
        assert set(theirs) <= set(mine)
        if self.torch.scaler._scale is None:
            return  # ours then needs no scale() any more: see docs/deviations.md
        self.torch.scaler.load_state_dict(mine)
        self.ours.scaler.load_state_dict(theirs)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "ours"):
            return
        for a, b in zip(self.torch.params, self.ours.params, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
        expected, got = self.torch.scaler, self.ours.scaler
        assert got.get_scale() == expected.get_scale()
        assert got._get_growth_tracker() == expected._get_growth_tracker()
        assert self.stages(self.ours) == self.stages(self.torch)

    @staticmethod
    def stages(side: Side) -> list[Any]:
        states = side.scaler._per_optimizer_states
        return [
            states[id(o)]["stage"] if id(o) in states else None for o in side.optimizers
        ]


class OnAnAccelerator(Machine):
    """State machine like `Machine`, with late reads as on an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.acting = exchanged("settled")
        self.acting.__enter__()

    def teardown(self) -> None:
        self.acting.__exit__(None, None, None)


TestMachine, TestOnAnAccelerator = Machine.TestCase, OnAnAccelerator.TestCase
TestMachine.settings = TestOnAnAccelerator.settings = settings(
    max_examples=75,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [(GradScaler, TorchGradScaler), (ShardedGradScaler, TorchShardedGradScaler)],
)
def test_every_name_of_torch_is_there(ours: Any, torchs: Any) -> None:
    import inspect

    scaler = ours(device="cpu")
    assert isinstance(scaler, torchs)
    expected = inspect.signature(torchs.__init__).parameters
    got = inspect.signature(ours.__init__).parameters
    assert list(got)[: len(expected)] == list(expected)
    for name, parameter in expected.items():
        assert got[name].default == parameter.default, name
    assert not [name for name in dir(torchs) if not hasattr(scaler, name)]
    state = scaler._per_optimizer_states[0]
    assert state == {"stage": OptState.READY, "found_inf_per_device": {}}
