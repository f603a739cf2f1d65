"""torch: groups that only their members make hang, or mix the groups after them.

python torch-local-group-names.py; exit code 1 where the bug shows.
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
from datetime import timedelta

LIMIT = timedelta(seconds=10)
MEMBERS, PAIRS = (0, 2), ((0, 1), (2, 3))


def made_by_members(rank: int) -> Any:
    """Return a group that only its members create; None on other ranks."""
    if rank not in MEMBERS:
        return None
    return dist.new_group(MEMBERS, timeout=LIMIT, use_local_synchronization=True)


def total(rank: int, group: Any) -> str:
    """Return the sum of the ranks in a group, by an all-reduce of the group."""
    number = torch.tensor(float(rank))
    dist.all_reduce(number, group=group)
    return f"{number.item():.0f}"


def after_another(rank: int) -> str:
    """Return the sum in a group made by members, after rank 0 joined one more group."""
    dist.new_group([0])  # on all ranks, as documented
    try:
        group = made_by_members(rank)
        return total(rank, group) if group else ""
    except RuntimeError as error:
        return f"raised {type(error).__name__}"


def before_others(rank: int) -> str:
    """Return the sum in a pair that all ranks create after a group made by members."""
    try:
        made_by_members(rank)
        pairs = [dist.new_group(pair, timeout=LIMIT) for pair in PAIRS]
        return total(rank, pairs[rank // 2])
    except RuntimeError as error:
        return f"raised {type(error).__name__}"


if __name__ == "__main__":
    first = [told for told in on_ranks(after_another, ranks=4) if told]
    print(f"after another group, ranks 0 and 2: {first}, due ['2', '2']")
    later = on_ranks(before_others, ranks=4)
    print(f"pairs made afterwards, by rank: {later}, due ['1', '1', '5', '5']")
    tell(
        first != ["2", "2"] or later != ["1", "1", "5", "5"],
        "torch",
        parameter="none, sums over groups",
        relative_error="none",
        reference="the sum of the ranks of a group",
    )
