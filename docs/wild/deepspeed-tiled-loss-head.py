"""DeepSpeed: TiledFusedLogitsLoss leaves the gradient of its head unscaled.

python deepspeed-tiled-loss-head.py; exit code 1 where the bug shows.
"""

import os
import sys
import tempfile
from importlib.metadata import version
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

RANKS, SIZE, WIDTH = 2, 12, 8
CONFIG = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 10000},
}  # fmt: skip
ROWS = torch.randint(SIZE, (2 * RANKS, 1, 8), generator=torch.manual_seed(1))
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled


def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model[1](x).flatten(0, -2), y.flatten())


class Tiled(nn.Sequential):
    def forward(self, rows: Tensor) -> Any:
        x, y, head = self[0](rows), rows.roll(-1, 1), [self[1].weight]
        return TiledFusedLogitsLoss.apply(loss, self, x, y, None, 4, head, "mean")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return Tiled(nn.Embedding(SIZE, WIDTH), nn.Linear(WIDTH, SIZE, bias=False))


def reference(dtype: torch.dtype) -> list[Any]:
    """The gradients of the mean over all micro-batches, untiled, on one process."""
    whole, rows = model().to(dtype), ROWS.flatten(0, 1)
    loss(whole, whole[0](rows), rows.roll(-1, 1)).backward()
    return [p.grad for p in whole.parameters()]


def rank_main(rank: int, folder: str, results: Any) -> None:
    """What a step of SGD with learning rate 1 moves, over two micro-batches a rank."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{RANKS}"}
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    optimizer = torch.optim.SGD((tiled := model()).parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=tiled, optimizer=optimizer, config=CONFIG)
    for row in ROWS[rank::RANKS]:
        engine.backward(engine(row))
        engine.step()
    moved = zip(model().parameters(), tiled.parameters())
    results.put([(a - b).tolist() for a, b in moved])  # the same on both ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, results), RANKS)
    exact, fp32 = reference(torch.float64), reference(torch.float32)
    pairs = zip([torch.tensor(g) for g in results.get()] + fp32, exact * 2)
    body, error, _, noise = (float((g - e).norm() / e.norm()) for g, e in pairs)
    print("versions: deepspeed", version("deepspeed"), "torch", torch.__version__)
    print(f"the embedding's gradient is off by {body:.0e}")
    print(f"parameter: head.weight\nrelative error: {error:.2e}")
    print(f"reference: untiled on one process, fp64; fp32 is off by {noise:.0e}")
    print("verdict:", "bug" if error > 1e-3 else "no bug")
    sys.exit(error > 1e-3)
