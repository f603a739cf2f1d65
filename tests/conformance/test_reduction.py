"""Dtype in which gradients are reduced: the log and the check."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradparity.conformance import Evidence, Scenario, Status
from gradparity.conformance.rank.observe import ReductionLog
from gradparity.conformance.rank.trace import (
    Collective,
    RankTrace,
    Reduction,
    StepTrace,
)
from gradparity.multiprocess import Cluster
from gradparity.tests.made_up import finding
from gradparity.tests.products import in_turn

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Seen = list[tuple[str, int]]
"""dtype and number of elements of each reduction of gradients."""


class Net(nn.Module):
    """Model whose activations have three dims: rows, tokens and features."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.recompute:
            found: Tensor = checkpoint(self.rest, x, use_reentrant=False)
            return found
        return self.rest(x)

    def rest(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.norm(x)).tanh())
        return y


def logged(model: nn.Module, dtype: torch.dtype = torch.float32) -> Seen:
    """Return the reductions logged in a step of two passes, a clip and an update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for log in (ReductionLog(), ReductionLog()):  # the second of two steps
        with log:
            for _ in range(2):
                x = torch.randn(4, 4, 8, dtype=dtype)
                model(x).float().square().mean().backward()
            for parameter in model.parameters():  # torch takes no mix of tensor types
                nn.utils.clip_grad_norm_([parameter], 1.0)
            optimizer.step()
            dist.all_reduce(torch.ones(16, dtype=torch.bfloat16))  # not of gradients
        optimizer.zero_grad()
    return [(r.dtype, r.elements) for r in log.reductions]


ALL = sum(p.numel() for p in Net().parameters())


def under_ddp(narrow: bool) -> Seen:
    model = DistributedDataParallel(Net())
    if narrow:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return logged(model)


def test_ddp_buckets_are_recorded_in_fp32(two: Cluster) -> None:
    for seen in two.run(under_ddp, False):
        assert seen == [("float32", ALL)] * 2


def test_the_dtype_of_a_compression_hook_is_recorded(two: Cluster) -> None:
    for seen in two.run(under_ddp, True):
        assert seen == [("float16", ALL)] * 2


def under_fsdp(blocks: bool) -> Seen:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = Net()
    for unit in (model.norm, model.up) * blocks:
        fully_shard(unit, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    return logged(model)


@pytest.mark.parametrize("blocks", [False, True])
def test_fully_shard_keeps_what_its_policy_promises(two: Cluster, blocks: bool) -> None:
    for seen in two.run(under_fsdp, blocks):
        assert {dtype for dtype, _ in seen} == {"float32"}
        assert sum(elements for _, elements in seen) == 2 * ALL


def split(model: nn.Module, mesh: Any, *, sequence: bool) -> None:
    plan: dict[str, tp.ParallelStyle] = {
        "up": tp.ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate()),
        "down": tp.RowwiseParallel(),
    }
    if sequence:
        plan["norm"] = tp.SequenceParallel()
        plan["first"] = tp.PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1)
        )
    tp.parallelize_module(model, mesh, plan)


def under_tp(sequence: bool) -> Seen:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Net().bfloat16()
    split(model, mesh, sequence=sequence)
    return logged(model, torch.bfloat16)


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_activations_are_none_of_parameters(
    two: Cluster, sequence: bool
) -> None:
    # those of the norm are partial sums, and are summed for the clip
    expected = [("bfloat16", 16)] * 2 if sequence else []
    for seen in two.run(under_tp, sequence):
        assert seen == expected


def under_fsdp_and_tp(sequence: bool, blocks: bool, recompute: bool) -> Seen:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    model.recompute = recompute
    split(model, mesh["tp"], sequence=sequence)
    for unit in (model.norm, model.up) * blocks:
        fully_shard(unit, mesh=mesh["dp"], mp_policy=POLICY)
    fully_shard(model, mesh=mesh["dp"], mp_policy=POLICY)
    return logged(model)


@pytest.mark.parametrize(
    ("blocks", "recompute"), in_turn([False, True], [False, True], each=1)
)
@pytest.mark.few(1)
def test_partial_gradients_are_summed_over_tp_in_the_dtype_of_the_compute(
    four: Cluster, blocks: bool, recompute: bool
) -> None:
    """pytorch#190626: weight and bias of a norm under sequence parallelism.

    From torch 2.15 on, ``fully_shard`` casts before the sum.
    """
    dtype = "float32" if torch.__version__ >= "2.15" else "bfloat16"
    for seen in four.run(under_fsdp_and_tp, True, blocks, recompute):
        assert [s for s in seen if s[1] == 16] == [(dtype, 16)] * 4
        assert {d for d, elements in seen if elements != 16} == {"float32"}


@pytest.mark.parametrize(
    ("blocks", "recompute"), in_turn([True, False], [False, True], each=1)
)
def test_without_partial_gradients_the_policy_holds_under_tp(
    four: Cluster, blocks: bool, recompute: bool
) -> None:
    for seen in four.run(under_fsdp_and_tp, False, blocks, recompute):
        assert {dtype for dtype, _ in seen} == {"float32"}


# - Reductions that a user writes


class Summed(torch.autograd.Function):
    """Identity in forward; backward sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        world = dist.distributed_c10d._get_default_group()
        total: Tensor = functional.all_reduce(gradient.bfloat16(), "sum", world)
        return total.float()


class Scaled(torch.autograd.Function):
    """Multiplies rows by a weight; backward itself sums the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        own = (gradient * x).sum((0, 1)).bfloat16()
        dist.all_reduce(own)
        return gradient * weight, own.float()


class Written(nn.Module):
    """Model with two layers and one reduction, at the place named ``where``."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.first, self.last = nn.Linear(8, 16, bias=False), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))
        if where == "hook":
            self.last.weight.register_hook(halved)
        if where == "after":
            self.last.weight.register_post_accumulate_grad_hook(
                lambda p: dist.all_reduce(p.grad.bfloat16())
            )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = Summed.apply(x) if self.where == "activation" else x  # type: ignore[no-untyped-call]
        if self.where == "flat activation":
            x = Summed.apply(x.view(-1, 16)).view(4, 4, 16)  # type: ignore[no-untyped-call]
        weight = self.last.weight
        weight = Summed.apply(weight) if self.where == "weight" else weight  # type: ignore[no-untyped-call]
        if self.where == "own":
            x = Scaled.apply(x, self.scale)  # type: ignore[no-untyped-call]
        return nn.functional.linear(x, weight, self.last.bias)


def halved(gradient: Tensor) -> Tensor:
    half = gradient.bfloat16()
    dist.all_reduce(half)
    return half.float()


def written(where: str) -> Seen:
    return logged(Written(where))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("hook", [("bfloat16", 256)] * 2),
        ("after", [("bfloat16", 256)] * 2),
        ("weight", [("bfloat16", 256)] * 2),
        ("own", [("bfloat16", 16)] * 2),
        ("activation", []),
        # 16 rows of 16: as many as a weight has
        ("flat activation", []),
    ],
)
def test_the_place_of_a_reduction_shows_whose_gradient_it_is(
    two: Cluster, where: str, expected: Seen
) -> None:
    for seen in two.run(written, where):
        assert seen == expected


def after_backward() -> Seen:
    """Return the logged reductions of an engine that reduces after all passes.

    The engine also sends messages that are not gradients, which the log must leave out.
    """
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ReductionLog() as log:
        dist.all_reduce(torch.ones(4))  # before any backward: a count of tokens
        for last in (False, True):
            model(torch.randn(4, 4, 8)).square().mean().backward()
            if not last:
                dist.all_reduce(torch.ones(20))  # of the forward pass that follows
        flat = torch.cat([p.grad.view(-1) for p in model.parameters()])  # type: ignore[union-attr]
        dist.all_reduce(flat.bfloat16())
        dist.all_reduce(torch.ones(()))
        dist.all_reduce(torch.ones(9, dtype=torch.int64))
        optimizer.step()
    return [(r.dtype, r.elements) for r in log.reductions]


def test_reductions_of_an_engine_after_backward_are_recorded(two: Cluster) -> None:
    for seen in two.run(after_backward):
        assert seen == [("bfloat16", ALL)]


def bits(log: bool) -> list[bytes]:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    split(model, mesh["tp"], sequence=True)
    fully_shard(model, mesh=mesh["dp"], mp_policy=POLICY)
    x = torch.randn(4, 4, 8)
    if log:
        with ReductionLog():
            model(x).float().square().mean().backward()
    else:
        model(x).float().square().mean().backward()
    grads = [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]
    return [g.numpy().tobytes() for g in grads]


def test_the_log_changes_no_bit(four: Cluster) -> None:
    assert four.run(bits, True) == four.run(bits, False)


# - The law


def promised(*reductions: tuple[str, int], dtype: str = "float32") -> Evidence:
    """Return evidence of two ranks with these reductions, ``dtype`` being declared.

    Each rank holds a bias of 4 elements, and half of a weight of 64.
    """
    index = {"bias": np.arange(4), "weight": np.arange(32, 64), "scale": np.arange(3)}
    traces = []
    for rank in range(2):
        trace = RankTrace(rank=rank, coordinate={"dp": rank}, index=index, shards={})
        trace.reduce_dtype = dtype
        seen = StepTrace(step=0, complete=True)
        seen.gradients = {n: np.ones(len(i), np.float32) for n, i in index.items()}
        seen.reductions = [
            Reduction(
                collective=Collective(f"allreduce[{elements}:{name}]", (0, 1)),
                dtype=name,
                elements=elements,
            )
            for name, elements in reductions
        ]
        trace.steps.append(seen)
        traces.append(trace)
    scenario = Scenario.parse("ddp/2/fp32/sgd/none/steps=1")
    return Evidence(scenario=scenario, ranks=tuple(traces), scaler=False)


def law(of: Evidence) -> tuple[str, int]:
    found = finding(of, "dtype.reduction")
    return found.status, found.compared


def test_a_narrower_dtype_is_reported_with_the_declared_one() -> None:
    found = finding(promised(("float32", 64), ("bfloat16", 64)), "dtype.reduction")
    assert found.status is Status.FAIL
    assert found.message == (
        "step 0: rank 0 reduced gradients in bfloat16, promised is float32: "
        "allreduce[64:bfloat16] over ranks 0, 1, as many elements as weight"
    )
    assert (found.step, found.ranks, found.parameter) == (0, (0,), "weight")
    assert (found.cause, found.compared) == ("allreduce in bfloat16", 128)


@pytest.mark.parametrize(
    ("seen", "dtype", "expected"),
    [
        ([("float32", 64)], "float32", ("pass", 78)),
        ([("float64", 64)], "float32", ("pass", 78)),
        ([("float32", 64)], "bfloat16", ("pass", 78)),
        ([("bfloat16", 64)], "bfloat16", ("pass", 78)),
        # neither holds the numbers of the other
        ([("bfloat16", 64)], "float16", ("fail", 64)),
        ([("float16", 64)], "bfloat16", ("fail", 64)),
        # a part of a parameter, and a buffer of several
        ([("bfloat16", 32)], "float32", ("fail", 32)),
        ([("bfloat16", 40)], "float32", ("fail", 40)),
        ([("bfloat16", 4)], "float32", ("fail", 4)),
        # one number a parameter is a norm of each
        ([("float32", 64), ("bfloat16", 2)], "float32", ("pass", 78)),
        ([("bfloat16", 2)], "float32", ("inconclusive", 0)),
        ([], "float32", ("inconclusive", 0)),
        # 36 of the 39 elements that a rank holds, and 4 of them
        ([("float32", 32), ("float32", 4)], "float32", ("pass", 72)),
        ([("float32", 4)], "float32", ("inconclusive", 8)),
        ([("bfloat16", 64)], "", ("skipped", 0)),
    ],
)
def test_dtype_reduction_fails_if_the_dtype_cannot_hold_the_promised(
    seen: Seen, dtype: str, expected: tuple[str, int]
) -> None:
    assert law(promised(*seen, dtype=dtype)) == expected


def test_a_promise_of_a_run_that_stopped_is_not_kept_yet() -> None:
    of = promised()
    for trace in of.ranks:
        trace.steps.clear()
    assert law(of) == ("inconclusive", 0)
