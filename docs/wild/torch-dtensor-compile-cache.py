"""torch: compiled code of another rank's shard is taken from the cache on disk.

python torch-dtensor-compile-cache.py; exit code 1 where the bug shows.
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
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ROWS = {"6 rows": 6, "5 rows": 5}  # of two ranks: 3 + 3, 3 + 2
RUNS = "first run", "second run"


def problem(rows: int) -> Tensor:
    """Return a whole tensor with this number of rows."""
    return torch.arange(4.0 * rows).unflatten(0, (rows, 4))


def compute(t: Tensor) -> Tensor:
    return t.sin() * 2 + 1


def rank_main(rank: int, rows: int) -> Any:
    """Return the compiled function's local result, or the error that it raises."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(problem(rows), mesh, [Shard(0)])
    try:
        return torch.compile(compute)(sharded).to_local()
    except AssertionError as error:
        return f"raises AssertionError: {str(error).splitlines()[0]}"


if __name__ == "__main__":
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for name, rows in ROWS.items():
            for run in RUNS:
                found[f"{name}, {run}"] = on_ranks(rank_main, rows)
    raised = {}
    for name, parts in found.items():
        raised[name] = [text for text in parts if isinstance(text, str)]
        exact = compute(problem(ROWS[name.split(",")[0]]))
        told = raised[name] or f"off by {off(torch.cat(parts), exact):.1e}"
        print(f"{name}: {told}")
    tell(
        bool(raised["5 rows, second run"]),
        "torch",
        parameter="none, the second run ends",
        relative_error="none: the call raises",
        reference="the first run, and equal shards",
    )
