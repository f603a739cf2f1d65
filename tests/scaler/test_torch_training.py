"""Training with a scaler beside training without, as torch's public tests do it.

Each test runs on torch's class and on ours: on torch's it shows that the test is right.
"""

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gradparity.tests.beside_torch import (
    CLASSES,
    PAIRS,
    PLAIN,
    Pair,
    bits,
    torch_sharded,
)
from gradparity.tests.products import pairs

INF, NAN = float("inf"), float("nan")
SKIPPED = 2
FLAVOURS: list[dict[str, bool]] = [{}, {"foreach": True}, {"fused": True}]
ADAPTIVE = pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
FLAVOUR = pytest.mark.parametrize(
    "flavour", FLAVOURS, ids=["for-loop", "foreach", "fused"]
)


class Case(NamedTuple):
    """One model, with its optimizer and its batches."""

    model: nn.Sequential
    optimizer: Any
    data: list[tuple[Tensor, Tensor]]


def case(kind: Any = torch.optim.SGD, **settings: Any) -> Case:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    data = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(4)]
    return Case(model, kind(model.parameters(), lr=0.5, **settings), data)


def loss_of(case: Case, batch: int) -> Tensor:
    inputs, targets = case.data[batch]
    return nn.functional.mse_loss(case.model(inputs), targets)


def spoil(case: Case, scaler: Any, batch: int) -> None:
    # The third batch overflows; a disabled scaler would step all the same.
    if batch != SKIPPED or not scaler.is_enabled():
        return
    weight = case.model[1].weight
    assert isinstance(weight, Tensor)
    assert weight.grad is not None
    weight.grad.fill_(INF)


def close(one: Case, other: Case) -> None:
    # Scales are powers of two, so dividing is exact; a fused kernel rounds its own way.
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        first, second = one.optimizer.state[a], other.optimizer.state[b]
        assert first.keys() == second.keys()
        for key, value in first.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(value, second[key], atol=1e-6, rtol=1e-5)


Step = Callable[[Case, Any, int], Any]


def plainly(case: Case, scaler: Any, batch: int) -> Any:
    scaler.scale(loss_of(case, batch)).backward()
    spoil(case, scaler, batch)
    scaler.step(case.optimizer)
    scaler.update()
    return scaler


def autocast(case: Case, scaler: Any, batch: int) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(case, batch)
    scaler.scale(loss).backward()
    spoil(case, scaler, batch)
    scaler.step(case.optimizer)
    scaler.update()
    return scaler


def pickled(case: Case, scaler: Any, batch: int) -> Any:
    return pickle.loads(pickle.dumps(plainly(case, scaler, batch)))


def clipping(case: Case, scaler: Any, batch: int) -> Any:
    scaler.scale(loss_of(case, batch)).backward()
    nn.utils.clip_grad_norm_(case.model.parameters(), 0.2 * scaler.get_scale())
    spoil(case, scaler, batch)
    scaler.step(case.optimizer)
    scaler.update()
    return scaler


def clipping_unscaled(case: Case, scaler: Any, batch: int) -> Any:
    scaler.scale(loss_of(case, batch)).backward()
    spoil(case, scaler, batch)
    scaler.unscale_(case.optimizer)
    nn.utils.clip_grad_norm_(case.model.parameters(), 0.2)
    scaler.step(case.optimizer)
    scaler.update()
    return scaler


def penalty(case: Case, scaler: Any, batch: int) -> Any:
    loss = loss_of(case, batch)
    params = list(case.model.parameters())
    scaled = torch.autograd.grad(scaler.scale(loss), params, create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    loss = loss + sum(((g * inverse) ** 2).sum() for g in scaled)
    scaler.scale(loss).backward()
    spoil(case, scaler, batch)
    scaler.step(case.optimizer)
    scaler.update()
    return scaler


PROGRAMS: list[Step] = [plainly, autocast, pickled, clipping, clipping_unscaled]
PROGRAMS += [penalty]


def without_scaler(step: Step, case: Case, batch: int, skipped: bool) -> None:
    loss = loss_of(case, batch)
    if step is penalty:
        params = list(case.model.parameters())
        grads = torch.autograd.grad(loss, params, create_graph=True)
        loss = loss + sum((g**2).sum() for g in grads)
    loss.backward()
    if step in (clipping, clipping_unscaled):
        nn.utils.clip_grad_norm_(case.model.parameters(), 0.2)
    if not skipped:
        case.optimizer.step()


def train(make: Any, step: Step, trained: Case, enabled: bool) -> Any:
    settings = {"init_scale": 128.0, "growth_factor": 2.0, "growth_interval": 1}
    scaler = make(**settings, enabled=enabled)
    for batch in range(4):
        trained.optimizer.zero_grad()
        scaler = step(trained, scaler, batch)
    return scaler


def refuse_what_torch_cannot(make: Any, step: Step, flavour: dict[str, bool]) -> None:
    if step is pickled and make is torch_sharded:
        pytest.skip("torch's sharded class cannot be pickled with its group (B11d)")
    if step is clipping_unscaled and make is torch_sharded and "fused" in flavour:
        pytest.skip("torch's sharded class: unscale_, then a fused step, raises (B09)")


@pairs(
    CLASSES,
    pytest.mark.parametrize("step", [s for s in PROGRAMS if s is not autocast]),
    pytest.mark.parametrize("enabled", [True, False]),
    pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam]),
    FLAVOUR,
)
def test_training_as_without_a_scaler(
    make: Any, step: Step, enabled: bool, kind: Any, flavour: dict[str, bool]
) -> None:
    refuse_what_torch_cannot(make, step, flavour)
    control, scaled = case(kind, **flavour), case(kind, **flavour)
    for batch in range(4):
        control.optimizer.zero_grad()
        without_scaler(step, control, batch, skipped=enabled and batch == SKIPPED)
    scaler = train(make, step, scaled, enabled)
    assert scaler.get_scale() == (128.0 * 2**3 * 0.5 if enabled else 1.0)
    close(control, scaled)


@PAIRS
@pytest.mark.parametrize("step", PROGRAMS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@FLAVOUR
def test_training_as_torch_trains_to_the_bit(
    pair: Pair, step: Step, kind: Any, flavour: dict[str, bool]
) -> None:
    refuse_what_torch_cannot(pair.theirs, step, flavour)
    seen = []
    for make in pair:
        trained = case(kind, **flavour)
        scaler = train(make, step, trained, enabled=True)
        params = list(trained.model.parameters())
        states = [trained.optimizer.state[p] for p in params]
        grads = [p.grad for p in params]
        seen.append(bits([params, grads, states, scaler.state_dict()]))
    assert seen[0] == seen[1]


@CLASSES
@pytest.mark.parametrize("early", [True, False])
@FLAVOUR
def test_accumulation(make: Any, early: bool, flavour: dict[str, bool]) -> None:
    control, scaled = case(**flavour), case(**flavour)
    scaler = make(init_scale=128.0, growth_interval=1)
    for batch in range(4):
        (loss_of(control, batch) / 2).backward()
        scaler.scale(loss_of(scaled, batch) / 2).backward()
        if batch % 2:
            control.optimizer.step()
            if early and not (make is torch_sharded and "fused" in flavour):
                scaler.unscale_(scaled.optimizer)
            scaler.step(scaled.optimizer)
            scaler.update()
            for each in (control, scaled):
                each.optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    close(control, scaled)


@CLASSES
@FLAVOUR
@pytest.mark.parametrize("nested", [True, False])
def test_several_models_losses_and_optimizers(
    make: Any, flavour: dict[str, bool], nested: bool
) -> None:
    control, scaled = [case(**flavour) for _ in "ab"], [case(**flavour) for _ in "ab"]
    scaler = make(init_scale=128.0, growth_interval=1)

    def losses(both: list[Case], batch: int) -> list[Tensor]:
        one, two = (loss_of(each, batch) for each in both)
        return [0.3 * one + 0.7 * two, 0.6 * one - 0.4 * two]

    for batch in range(4):
        for each in (*control, *scaled):
            each.optimizer.zero_grad()
        first, second = losses(control, batch)
        first.backward(retain_graph=True)
        second.backward()
        made = losses(scaled, batch)
        first, second = scaler.scale(made) if nested else map(scaler.scale, made)
        first.backward(retain_graph=True)
        second.backward()
        spoil(scaled[1], scaler, batch)
        scaler.step(scaled[0].optimizer)
        scaler.step(scaled[1].optimizer)
        scaler.update()
        control[0].optimizer.step()
        if batch != SKIPPED:
            control[1].optimizer.step()
    assert scaler.get_scale() == 128.0 * 2**3 * 0.5
    for one, other in zip(control, scaled, strict=True):
        close(one, other)


@CLASSES
@ADAPTIVE
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_fused_beside_not_fused(
    make: Any, kind: Any, amsgrad: bool, separate: bool
) -> None:
    if make is torch_sharded and separate:
        pytest.skip("torch's sharded class: unscale_, then a fused step, raises (B09)")
    plain = case(kind, fused=False, amsgrad=amsgrad)
    fused = case(kind, fused=True, amsgrad=amsgrad)
    scaler = make(init_scale=128.0)
    for batch in range(4):
        for each in (plain, fused):
            each.optimizer.zero_grad()
            scaler.scale(loss_of(each, batch)).backward()
            if separate and each is fused:
                scaler.unscale_(each.optimizer)
            scaler.step(each.optimizer)
            scaler.update()
        close(plain, fused)
        for p, q in zip(
            plain.model.parameters(), fused.model.parameters(), strict=True
        ):
            torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-5)


@PLAIN
@ADAPTIVE
@FLAVOUR
def test_gradients_broken_after_unscale_are_stepped_with(
    make: Any, kind: Any, flavour: dict[str, bool]
) -> None:
    trained, scaler = case(kind, **flavour), make(init_scale=128.0)
    for batch in range(4):
        trained.optimizer.zero_grad()
        scaler.scale(loss_of(trained, batch)).backward()
        scaler.unscale_(trained.optimizer)
        for n, p in enumerate(trained.model.parameters()):
            assert p.grad is not None
            p.grad.fill_(INF if n % 2 else NAN)
        scaler.step(trained.optimizer)
        scaler.update()
    assert not any(p.isfinite().all() for p in trained.model.parameters())
