"""Defects that show only over several iterations of a real run."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from gradparity.fixtures.models import MODELS, loss
from gradparity.fixtures.topologies import TOPOLOGIES
from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler, RanksDisagreeError, ShardedGradScaler


def train_fp16(make: Any, steps: int, fused: bool) -> tuple[list[float], list[Any]]:
    """Train on a 2 x 2 mesh in fp16, with a scale so high that gradients overflow."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = TOPOLOGIES["fsdp+tp"].apply(MODELS["digits"].make(), mesh, policy)
    params: Any = model.parameters()
    optimizer = torch.optim.AdamW(params, lr=1e-2, fused=fused)
    scaler = make(device="cpu", init_scale=2.0**19, growth_interval=2)
    data = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    scales, norms = [], []
    for _ in range(steps):
        inputs = torch.rand(8, 64, generator=data)
        targets = torch.randint(10, (8,), generator=data)
        scaler.scale(loss(model(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        replicated = [
            p.to_local().detach().clone()
            for p in model.parameters()
            if isinstance(p, DTensor) and p.device_mesh.ndim == 1
        ]
        norms.append(replicated)
    return scales, norms


@pytest.mark.parametrize(
    ("make", "fused"), [(GradScaler, False), (ShardedGradScaler, True)]
)
@pytest.mark.few(1)
def test_b01d_natural_overflow_on_two_axes(
    four: Cluster, make: Any, fused: bool
) -> None:
    results = four.run(train_fp16, make, 16, fused)
    scales = [scales for scales, _ in results]
    assert all(each == scales[0] for each in scales)  # at every step, not at the end
    backoffs = sum(b < a for a, b in zip(scales[0], scales[0][1:], strict=False))
    assert backoffs >= 3 and max(scales[0]) < 2**24  # it did overflow
    for first, second in ((0, 1), (2, 3)):  # tensor parallel neighbours
        for a, b in zip(results[first][1], results[second][1], strict=True):
            assert a and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def uneven(sync_over: Any) -> Any:
    """Train with one batch more on rank 1, as `Join` does."""
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(
        device="cpu", init_scale=4.0, growth_interval=2, sync_over=sync_over
    )
    with Join([model]):
        for _ in range(3 + dist.get_rank()):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    return scaler


def test_b15b_uneven_inputs(two: Cluster) -> None:
    def run(synchronise: bool) -> Any:
        scaler = uneven("local")  # a rank that has stopped can agree no more
        state = scaler.state_dict()
        if synchronise:
            box = [state]
            dist.broadcast_object_list(box, src=1)  # the rank that went on longest
            state = box[0]
        scaler = GradScaler(device="cpu")
        try:
            scaler.load_state_dict(state)
        except RanksDisagreeError as error:
            return sorted(error.lowest)
        p = torch.ones(2, requires_grad=True)
        p.grad = torch.ones(2)
        scaler.step(torch.optim.SGD([p]))
        return scaler.get_scale(), scaler._get_growth_tracker()

    # The drift cannot be prevented there, but it cannot go on unseen either.
    drifted = two.run(run, False)
    assert drifted[0] == drifted[1] and "growth_tracker" in drifted[0]
    assert two.run(run, True) == [(16.0, 0)] * 2
