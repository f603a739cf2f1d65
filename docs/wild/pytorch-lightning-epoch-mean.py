"""Lightning: the epoch's mean of a value logged with sync_dist is too large.

python pytorch-lightning-epoch-mean.py; exit code 1 where the bug shows.
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
import logging
import warnings

from pytorch_lightning import LightningModule, Trainer
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

ROWS = {"8 rows": (5, 3), "7 rows": (4, 3)}  # of the two ranks


def problem(dtype: torch.dtype, name: str) -> tuple[Tensor, ...]:
    """Return the rows of each rank; a row is a feature and a target."""
    torch.manual_seed(0)
    return torch.randn(sum(ROWS[name]), 2).to(dtype).split(ROWS[name])


class Module(LightningModule):
    """Logs its mean loss as documented, and also a sum and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def validation_step(self, batch: Tensor, index: int) -> None:
        loss = mse_loss(batch[:, 0] * self.weight, batch[:, 1])
        rows = float(len(batch))
        self.log("mean", loss, sync_dist=True, batch_size=len(batch))
        self.log("sum", loss * rows, sync_dist=True, reduce_fx="sum")
        self.log("rows", rows, sync_dist=True, reduce_fx="sum")


def rank_main(rank: int) -> dict[str, dict[str, Tensor]]:
    """Validate one epoch for each number of rows; return the logged values."""
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    found = {}
    for name in ROWS:
        trainer = Trainer(
            accelerator="cpu",
            devices=len(ROWS[name]),
            strategy="ddp",
            logger=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
        )
        rows = problem(torch.float32, name)[rank]
        loader = DataLoader(rows, batch_size=len(rows))
        (logged,) = trainer.validate(Module(), loader, verbose=False)
        found[name] = {key: torch.tensor(value) for key, value in logged.items()}
    return found


def reference(dtype: torch.dtype, name: str) -> Tensor:
    """Return the mean loss over the rows of all ranks."""
    return mse_loss(*torch.cat(problem(dtype, name)).unbind(1))


if __name__ == "__main__":
    found = on_ranks(rank_main)[0]
    for name, logged in found.items():
        exact = reference(torch.float64, name)
        wrong = off(logged["mean"], exact)
        sums = off(logged["sum"] / logged["rows"], exact)
        print(f"{name}: the mean is off by {wrong:.1e}, sum by count {sums:.1e}")
    noise = off(reference(torch.float32, "7 rows"), exact)
    tell(
        not wrong < 1e-3,
        "pytorch-lightning",
        parameter="the logged loss",
        relative_error=f"{wrong:.2e}",
        reference=f"the mean over all rows, fp64; fp32 is off by {noise:.0e}",
    )
