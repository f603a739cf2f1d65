"""Gradients of other classes: subclasses, wrappers, fake tensors.

Also a scaler that disables itself because the machine has no GPU.
"""

import warnings
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler, ShardedGradScaler
from gradparity.scaler.grads import by_device_and_dtype
from gradparity.tests.stepping import BOTH, FUSED, INF, WAYS, scaled


class Named(Tensor):
    """Subclass without changes."""


class Around(Tensor):
    """Holds another tensor, as torchao's classes do; torch refuses its ``tolist``."""

    held: Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl
    refused: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Around":
        made: Any = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is of a disabled one
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._opname in cls.refused:
            raise NotImplementedError(f"{cls.__name__} has no {func._opname}")
        here = tree_map_only(Around, lambda t: t.held, (args, kwargs or {}))
        out = func(*here[0], **here[1])
        if not func._schema.returns:
            return None
        is_in_place = func._schema.is_mutable
        return args[0] if is_in_place else tree_map_only(Tensor, cls, out)


class KnowsNoNorm(Around):
    """Tensor that supports only the kernel of ``unscale_``, which torch calls."""

    refused = ("abs", "_foreach_norm", "isfinite", "linalg_vector_norm", "isnan")


def named(inner: Tensor) -> Tensor:
    return inner.as_subclass(Named)


# regression: T12
@BOTH
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        *((kind, call) for kind in (named, Around) for call in WAYS),
        *((KnowsNoNorm, call) for call in WAYS[:2]),  # a clip needs a norm
    ],
)
def test_subclasses_step_and_skip(make: Any, kind: Any, call: Any) -> None:
    p = nn.Parameter(kind(torch.ones(2)))
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), scaled(make)
    weights, scales = [], []
    for value in (4.0, INF, 4.0):
        p.grad = kind(torch.full((2,), value))
        call(scaler, optimizer, 1.0)
        scaler.update()
        plain = p.detach()
        weights.append(getattr(plain, "held", plain)[0].item())
        scales.append(scaler.get_scale())
    first = 1.0 if "clip" not in call.__name__ else 0.5**0.5
    last = 2.0 if "clip" not in call.__name__ else 0.5**0.5
    assert weights == pytest.approx([1 - first, 1 - first, 1 - first - last], abs=1e-5)
    assert scales == [4.0, 2.0, 2.0]
    named_overflow = kind is not KnowsNoNorm
    assert (scaler.last_overflow is not None) == named_overflow


@BOTH
@pytest.mark.parametrize("call", WAYS)
def test_whole_iterations_under_fake_tensors(make: Any, call: Any) -> None:
    """Memory estimators train so; the step is fused, as an unfused one reads values."""
    with FakeTensorMode():
        p = nn.Parameter(torch.ones(2, 3))
        optimizer = torch.optim.AdamW([p], fused=True)
        scaler = make("cpu", init_scale=4.0, growth_interval=2)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(p.sum()).backward()
            call(scaler, optimizer, 1.0)
            scaler.update()
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update(8.0)


# regression: S3
@FUSED
@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_and_step"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="it is for a machine without one")
def test_a_scaler_that_disabled_itself_clips(
    two: Cluster, fused: bool, call: str
) -> None:
    def run() -> list[float]:
        norms = []
        for make in (GradScaler, ShardedGradScaler):
            choices: list[dict[str, Any]] = [{}, {"enabled": False}]
            for settings in choices:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that CUDA is not available
                    scaler: Any = make(**settings)
                p = nn.Parameter(torch.ones(2))
                p.grad = torch.full((2,), 4.0)
                optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
                norms.append(getattr(scaler, call)(optimizer, 1.0).item())
        return norms

    for norms in two.run(run):
        assert norms == pytest.approx([32**0.5] * 4)


def test_gradients_are_grouped_by_device_and_dtype() -> None:
    kinds = [("cuda:0", torch.float32), ("cuda:1", torch.float32)]
    kinds += [("cuda:0", torch.bfloat16), ("cpu", torch.float32)]
    with FakeTensorMode():
        of_kind = {
            (torch.device(device), dtype): [
                torch.ones(2, device=device, dtype=dtype) for _ in range(3)
            ]
            for device, dtype in kinds
        }
        for several in chain(combinations(of_kind, 1), combinations(of_kind, 2)):
            in_turn = zip(*(of_kind[kind] for kind in several), strict=True)
            groups = by_device_and_dtype([*chain(*in_turn)], allow_fp16=False)
            ids = {kind: [*map(id, group)] for kind, group in groups.items()}
            assert ids == {kind: [*map(id, of_kind[kind])] for kind in several}
    assert by_device_and_dtype([], allow_fp16=False) == {}
