"""vector-quantize-pytorch: LFQ's codebook entropy is not that of all ranks.

python vector-quantize-pytorch-lfq-entropy.py; exit code 1 where the bug shows.
"""

# - The frame, the same in all scripts. Exit code 1: bug, 0: no bug, 3: no verdict.
import os
import sys
import tempfile
from importlib.metadata import version
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def crashed(*error: Any) -> NoReturn:
    """Print an error, such as a failed import, and exit with 3: no verdict."""
    sys.__excepthook__(*error)
    sys.exit(3)


def as_rank(rank: int, main: Any, given: Any, ranks: int, folder: str) -> None:
    """Run main on one rank of a process group, and save its result."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ |= {name: str(number) for name, number in where.items()}
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=ranks
    )
    try:
        torch.save(main(rank, *given), f"{folder}/{rank}.pt")
        dist.barrier()  # no rank leaves while another still needs it
    finally:
        dist.destroy_process_group()


def on_ranks(main: Any, *given: Any, ranks: int = 2) -> list[Any]:
    """Run main(rank, *given) on all ranks; return their results, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(as_rank, (main, given, ranks, folder), ranks)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)]


def off(found: Any, exact: torch.Tensor) -> float:
    """Return the relative error of a gradient; a missing one counts as zero."""
    return float(((0 if found is None else found) - exact).norm() / exact.norm())


def tell(bug: bool, package: str, **lines: str) -> NoReturn:
    """Print versions, lines and verdict; exit with 1 for a bug, else 0."""
    versions = {name: version(name) for name in dict.fromkeys((package, "torch"))}
    print("versions:", *(f"{name} {number}" for name, number in versions.items()))
    for key, text in lines.items():
        print(f"{key.replace('_', ' ')}: {text}")
    print("verdict:", "bug" if bug else "no bug", flush=True)
    sys.exit(int(bug))


sys.excepthook = crashed
# - The finding
from unittest.mock import patch

from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from vector_quantize_pytorch import LFQ
from vector_quantize_pytorch import lookup_free_quantization as lfq

BITS, ROWS, RANKS = 4, 16, 2
GAMMAS = {"as it is": 1.0, "no codebook entropy": 0.0, "sum returned": 1.0}


class Net(nn.Module):
    """One-layer encoder that returns the entropy loss of its codes."""

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, BITS)
        settings = {"entropy_loss_weight": 1.0, "diversity_gamma": gamma}
        self.quantizer = LFQ(dim=BITS, force_quantization_f32=False, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.quantizer(self.encoder(x), inv_temperature=1.0).entropy_aux_loss


def problem(dtype: torch.dtype, way: str) -> tuple[Net, Tensor]:
    """Return the model and the rows of all ranks, the same on all ranks."""
    torch.manual_seed(0)
    model = Net(GAMMAS[way]).to(dtype)
    return model, torch.randn(RANKS, ROWS, 6).to(dtype)


def mean_of_ranks(t: Tensor) -> Tensor:
    """Return the mean over ranks; the package ignores the result of all_reduce."""
    return all_reduce(t) / RANKS


def rank_main(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return way -> (mean loss of the ranks, encoder's gradient)."""
    found = {}
    for way in GAMMAS:
        used = mean_of_ranks if way == "sum returned" else lfq.maybe_distributed_mean
        with patch.object(lfq, "maybe_distributed_mean", used):
            model, x = problem(torch.float32, way)
            stack = DistributedDataParallel(model)
            loss = stack(x[rank : rank + 1])
        loss.backward()
        dist.all_reduce(mean := loss.detach() / RANKS)
        found[way] = mean, model.encoder.weight.grad
    return found


def reference(dtype: torch.dtype, way: str) -> tuple[Tensor, Tensor]:
    """Return loss and encoder's gradient on one process, over all rows."""
    model, x = problem(dtype, way)
    loss = model(x)
    loss.backward()
    return loss.detach(), model.encoder.weight.grad


if __name__ == "__main__":
    found, errors = on_ranks(rank_main)[0], {}
    for way in GAMMAS:
        exact = reference(torch.float64, way)
        errors[way] = [*map(off, found[way], exact)]
        print("{}: loss off by {:.1e}, gradient by {:.1e}".format(way, *errors[way]))
    wrong = errors["as it is"][1]
    noise = off(reference(torch.float32, way)[1], exact[1])
    tell(
        not wrong < 1e-3,
        "vector-quantize-pytorch",
        parameter="encoder.weight",
        relative_error=f"{wrong:.2e}",
        reference=f"one process, fp64; fp32 is off by {noise:.0e}",
    )
