"""Every private name of torch that this package uses, one function or alias each.

``tests/conformance/test_private_names.py`` asserts that each name exists with the
expected signature, so a change in torch fails there and not in a check.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:  # this import takes half a second, and only ranks need it
    from torch.distributed.pipelining import ScheduleGPipe

__all__ = [
    "AsyncCollectiveTensor",
    "Observer",
    "TorchDispatchMode",
    "arguments_of",
    "current_node",
    "in_backward",
    "input_shapes",
    "makes_view",
    "nodes_made",
    "ranks_of",
    "set_loss_function",
    "set_timeout",
    "version_of",
]


class Observer(TorchDispatchMode):
    """A dispatch mode that does not change how user code is compiled.

    Under any other mode Dynamo leaves a function uncompiled for the life of the
    process, and raises with ``fullgraph=True``. Torch then also rejects higher-order
    operators such as flex attention.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compile as without the mode, and run compiled code under it."""
        return True


def in_backward() -> bool:
    """Return True if autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def current_node() -> Any:
    """Return the autograd node that runs in this thread, or None."""
    return torch._C._current_autograd_node()


def nodes_made() -> int:
    """Return the number of autograd nodes that this thread has created so far."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's memory was written by operators of torch."""
    version: int = tensor._version
    return version


def input_shapes(node: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the gradients that an autograd node receives."""
    return [tuple(metadata.shape) for metadata in node._input_metadata]


def arguments_of(func: Any) -> list[Any]:
    """Return an operator's arguments: name, default_value, has_default_value."""
    return list(func._schema.arguments)


def makes_view(func: Any) -> bool:
    """Return True if an operator's first result is a view of an argument."""
    alias = func._schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the ranks of a collective's group.

    The group may be given as itself, as a boxed script object or by its name.
    """
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    # functional collectives pass a group's name
    elif not isinstance(group, dist.ProcessGroup):
        group = _resolve_process_group(group)
    return tuple(dist.get_process_group_ranks(group))


def set_loss_function(
    schedule: ScheduleGPipe, loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Replace the loss function of a pipeline schedule."""
    schedule._loss_fn = loss


def set_timeout(limit: timedelta) -> None:
    """Set the timeout of collectives in the default group."""
    _set_pg_timeout(limit)
