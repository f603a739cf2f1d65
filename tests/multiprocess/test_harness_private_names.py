"""Each private name of torch that ranks use exists.

ruff ensures that only one module uses them (SLF001, PLC2701).
"""

import inspect
from types import FunctionType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradparity.multiprocess import Cluster, current_world
from gradparity.multiprocess.rank import torch_internals as internals


def test_what_makes_groups_is_one_function() -> None:
    owner, name = internals.NEW_GROUP
    functions = [(n, f) for n, f in vars(owner).items() if type(f) is FunctionType]
    makers = {n for n, f in functions if f" {name}(" in inspect.getsource(f)} - {name}
    assert makers == {"init_process_group", "_new_group_with_tag"}
    assert owner is distributed_c10d and internals.BACKWARD.co_name.endswith("backward")


def test_the_default_device_is_known_once_it_is_set() -> None:
    def look() -> list[str]:
        before = internals.default_device()
        torch.set_default_device("meta")
        return [str(before), str(internals.default_device())]

    with Cluster(1) as cluster:
        assert cluster.run(look) == [["None", "meta"]]
        assert cluster.run(look) == [["None", "meta"]]


def test_groups_are_counted() -> None:
    def count() -> list[int]:
        before = internals.process_groups()
        group = dist.new_group([0, 1])
        dist.barrier(group)  # gloo: a peer may still be connecting
        dist.destroy_process_group(group)
        made = [dist.new_group([0, 1]) for _ in range(2)]
        current_world().mesh((2,), ("data",))
        return [before, internals.process_groups(), len(made)]

    with Cluster(2) as cluster:
        for before, after, _ in cluster.run(count):
            assert (before, after) == (1, 3)
