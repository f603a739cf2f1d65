"""Each private name of torch that ranks use exists, and one module says it."""

import ast
import inspect
from pathlib import Path
from types import FunctionType

import torch.distributed as dist
from torch.distributed import distributed_c10d

import gradparity.multiprocess
from gradparity.multiprocess import Cluster, current_world
from gradparity.multiprocess.rank import torch_internals as internals

ROOM = Path(gradparity.multiprocess.__file__).parent
HOMES = {"torch_internals.py"}


def test_what_makes_groups_is_one_function() -> None:
    owner, name = internals.NEW_GROUP
    functions = [(n, f) for n, f in vars(owner).items() if type(f) is FunctionType]
    makers = {n for n, f in functions if f" {name}(" in inspect.getsource(f)} - {name}
    assert makers == {"init_process_group", "_new_group_with_tag"}
    assert owner is distributed_c10d and internals.BACKWARD.co_name.endswith("backward")
    group = inspect.signature(internals.threaded_groups().Collective.__init__)
    assert list(group.parameters) == ["self", "world_size", "collective", "pg"]
    join = inspect.signature(internals.threaded_groups().Collective.join)
    assert list(join.parameters) == ["self", "rank", "data"]


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


def test_no_other_module_names_private_torch() -> None:
    found = []
    for path in sorted(ROOM.rglob("*.py")):
        if path.name in HOMES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "")[:5] == "torch":
                names = (*str(node.module).split("."), *(a.name for a in node.names))
                found += [(path.name, name) for name in names]
            elif isinstance(node, ast.Attribute) and _is_torch(node.value):
                found.append((path.name, node.attr))
    assert len(found) > 20
    private = {(p, n) for p, n in found if n[0] == "_" and n[:2] != "__"}
    # Tests of torch's classes are made of these.
    assert private == {("unittests.py", "_internal")}


def _is_torch(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("torch", "dist")
