"""Without gradparity: ZeRO 1 and 2 train on the last backward of a step alone.

    python examples/stacks/confirm_deepspeed.py

Needs deepspeed. One process runs two backwards, then one step of SGD with learning rate
1. The change of the weight is compared with the sum of both gradients and with the
second one. Prints five lines in under a minute: stages 1 and 2 train on "the last"
backward. Stage 3, and 1 and 2 with ``managed_gradient_accumulation: false``, train on
"both".
"""

import os
import tempfile

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def moved(stage: int, managed: bool, weight: Tensor, halves: list[Tensor]) -> Tensor:
    """Return minus the update of one step that follows a backward of each half."""
    model = nn.Linear(4, 4, bias=False)
    model.load_state_dict({"weight": weight})
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": managed,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
        },
    )
    for half in halves:
        engine.backward(engine(half).square().mean())
    engine.step()
    full: Tensor = deepspeed.utils.safe_get_full_fp32_param(engine.module.weight)
    return weight - full.view_as(weight)


os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
with tempfile.NamedTemporaryFile() as store:
    dist.init_process_group("gloo", f"file://{store.name}", rank=0, world_size=1)
    torch.manual_seed(0)
    weight = torch.randn(4, 4, requires_grad=True)
    halves = list(torch.randn(8, 4).chunk(2))
    losses = [(half @ weight.T).square().mean() for half in halves]
    first, last = (torch.autograd.grad(loss, weight)[0] for loss in losses)
    for stage, managed in [(1, True), (2, True), (3, True), (1, False), (2, False)]:
        found = moved(stage, managed, weight.detach(), halves)
        kept = "both" if torch.allclose(found, first + last, atol=1e-5) else "neither"
        kept = "the last" if torch.allclose(found, last, atol=1e-5) else kept
        print(f"ZeRO {stage}, managed {managed}: trains on {kept} of two backwards")
    dist.destroy_process_group()
