"""Backward passes of nudged runs are rounded otherwise: their sums show their noise."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradparity.conformance.record.backward import FACTOR, Rounding
from gradparity.conformance.record.compare import DIFFERENT, SAME, Side, compare
from gradparity.conformance.record.merge import Run
from gradparity.tests.record.test_recorder import recorded

Loss = Callable[[nn.Module, Tensor], Tensor]
ROWS, STEPS = 24, 2


def critic() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def batch(step: int) -> Tensor:
    """Return rows of which the first half is real, and the second one made up."""
    generator = torch.Generator().manual_seed(step)
    real, fake = (torch.randn(ROWS, 6, generator=generator) for _ in range(2))
    return torch.cat([real, fake + 1])


def wasserstein(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss whose last bias has summands that cancel, whatever the weights."""
    real, fake = model(x).chunk(2)
    loss: Tensor = fake.mean() - real.mean()
    return loss


def hinge(model: nn.Module, x: Tensor) -> Tensor:
    real, fake = model(x).chunk(2)
    return torch.relu(1 - real).mean() + torch.relu(1 + fake).mean()


def training(loss_of: Loss, ranks: int) -> Iterator[Tensor]:
    """Yield the losses of a loop; ``ranks`` parts of each batch have one backward each.

    The gradients are then summed as on ranks.
    """
    model = critic()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        halves = (half.chunk(ranks) for half in batch(step).chunk(2))
        for parts in zip(*halves, strict=True):
            yield loss_of(model, torch.cat(parts)) / ranks
        optimizer.step()


def run_of(folder: Path, loss_of: Loss, ranks: int, nudge: int = 0) -> Run:
    name = f"{ranks}-{nudge}"
    return recorded(
        folder / name, training(loss_of, ranks), steps=(0, STEPS), nudge=nudge
    )


@pytest.mark.parametrize("loss_of", [wasserstein, hinge])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_that_no_weight_moves_have_noise(
    loss_of: Loss, ranks: int, tmp_path: Path
) -> None:
    plain, once, twice = (run_of(tmp_path, loss_of, 1, nudge) for nudge in range(3))
    mesh = Side(name="mesh", run=run_of(tmp_path, loss_of, ranks))
    bias = (0, "gradient", "2.bias")
    assert plain.tensors[bias].distance(once.tensors[bias]) == 0
    assert plain.tensors[bias].distance(twice.tensors[bias]) > 0
    one = Side(name="one", run=plain, noisy=[plain, once, twice])
    compared = compare(one, mesh)
    assert compared.code == SAME, compared.lines
    wrong = Side(
        name="mesh", run=run_of(tmp_path / "twice", lambda m, x: 2 * loss_of(m, x), 2)
    )
    assert compare(one, wrong).code == DIFFERENT


def squared(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def given(model: nn.Module, x: Tensor) -> None:
    model(x).backward(torch.linspace(-1, 1, len(x))[:, None])


def two_roots(model: nn.Module, x: Tensor) -> None:
    torch.autograd.backward([model(x).mean(), model(x).square().mean()])


def recomputed(model: nn.Module, x: Tensor) -> None:
    y: Any = checkpoint(model, x.requires_grad_(), use_reentrant=False)
    y.square().mean().backward()


def recomputed_inside(model: nn.Module, x: Tensor) -> None:
    """A reentrant checkpoint makes a backward pass inside of another one."""
    y: Any = checkpoint(model, x.requires_grad_(), use_reentrant=True)
    y.square().mean().backward()


def penalised(model: nn.Module, x: Tensor) -> None:
    (slope,) = torch.autograd.grad(
        model(x.requires_grad_()).sum(), x, create_graph=True
    )
    (slope.norm(dim=1) - 1).square().mean().backward()


def by_keyword(model: nn.Module, x: Tensor) -> None:
    roots: Any = iter([model(x).mean()])
    torch.autograd.backward(roots, grad_tensors=[torch.tensor(2.0)])


def from_an_edge(model: nn.Module, x: Tensor) -> None:
    """Gradients of edges are left as they are."""
    edge = torch.autograd.graph.get_gradient_edge(model(x).square().mean())
    torch.autograd.backward(edge)


def late_checkpoint(model: nn.Module, x: Tensor) -> None:
    """The inner pass hands the gradient of its input back to the outer one."""
    first, *rest = model.children()
    y: Any = checkpoint(nn.Sequential(*rest), first(x), use_reentrant=True)
    y.square().mean().backward()


def clipped(model: nn.Module, x: Tensor) -> None:
    """Hooks of the job get gradients without the factor of the loss."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    model(x).square().mean().backward()


def in_complex_numbers(model: nn.Module, x: Tensor) -> None:
    (model(x) * torch.tensor(1 + 1j)).abs().mean().backward()


def accumulated(model: nn.Module, x: Tensor) -> None:
    for part in x.chunk(3):
        model(part).square().mean().backward()


@pytest.mark.parametrize(
    "passes",
    [
        squared,
        given,
        two_roots,
        recomputed,
        recomputed_inside,
        penalised,
        accumulated,
        by_keyword,
        late_checkpoint,
        clipped,
        in_complex_numbers,
        from_an_edge,
    ],
)
def test_gradients_differ_by_their_rounding_alone(
    passes: Callable[[nn.Module, Tensor], None],
) -> None:
    models = critic(), critic()
    passes(models[0], batch(0))
    own = torch.autograd.backward
    rounding = Rounding(lambda _: nullcontext())
    rounding.install()
    models[1].register_forward_hook(lambda *each: rounding.see(each[2]))
    try:
        passes(models[1], batch(0))
    finally:
        rounding.remove()
    assert torch.autograd.backward is own and rounding.depth == 0
    pairs = [
        (a.grad, b.grad)
        for a, b in zip(*(m.parameters() for m in models), strict=True)
        if a.grad is not None and b.grad is not None
    ]
    assert len(pairs) == 4 - (passes is penalised)
    is_moved = not all(torch.equal(*pair) for pair in pairs)
    assert is_moved or passes is from_an_edge
    for right, rounded in pairs:
        torch.testing.assert_close(rounded, right, rtol=1e-5, atol=1e-5)


def test_gradients_of_complex_outputs_stay() -> None:
    rounding = Rounding(lambda _: nullcontext())
    x = torch.ones(2, requires_grad=True)
    output = x * torch.tensor(1 + 1j)
    rounding.see({"output": output, "real": output.real})
    output.abs().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_an_error_of_a_backward_pass_is_the_jobs_own() -> None:
    rounding = Rounding(lambda _: nullcontext())
    rounding.install()
    try:
        with pytest.raises(RuntimeError, match="grad can be implicitly created only"):
            critic()(batch(0)).backward()
        model = critic()
        model(batch(0)).mean().backward()
    finally:
        rounding.remove()
    (bias,) = (p.grad for n, p in model.named_parameters() if n == "2.bias")
    assert rounding.depth == 0 and bias is not None
    assert bias.item() == pytest.approx(1.0) and FACTOR < 1
