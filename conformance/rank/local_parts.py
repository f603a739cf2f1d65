"""A rank's parts of a model's tensors, as the workload's methods describe them.

A part is given as the whole tensor, a DTensor, or (tensor, slices of the whole). Each
form defines which elements it holds, so gradparity writes nothing into the model and
makes no collective call.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...fixtures import ResolvedWorkload, is_constant, local
from ..record.parts import WRAPPERS
from .observe import numbers_laid_out_as

__all__ = [
    "FP32",
    "OTHERWISE",
    "LocalPart",
    "by_full_name",
    "check_values",
    "full_name",
    "parameters_of",
    "read_local_parts",
]

OTHERWISE = "lays the model out differently when it is called again"
FP32 = (
    "parameters stay torch.float32; if the weights are in half precision, let "
    "weights(stack) give the fp32 copies that the optimizer steps"
)


def parameters_of(module: nn.Module, whole: Container[str]) -> dict[str, nn.Parameter]:
    """Return the parameters of a laid-out module, by their names in the full model.

    Args:
        module: result of ``parallelize``.
        whole: parameter names of the full model.
    """
    named = {full_name(name, whole): p for name, p in module.named_parameters()}
    return {n: p for n, p in named.items() if n in whole or not is_constant(p)}


def full_name(name: str, whole: Container[str]) -> str:
    """Return the name in the full model for the name of a wrapped parameter.

    Wrappers add components such as ``module`` to a name. A model may also have a layer
    of that name, so no more components are removed than are needed to get a name in
    ``whole``.

    Args:
        name: name of a parameter after ``parallelize``.
        whole: parameter names of the full model.

    Returns:
        The name; ``name`` itself if no removal gives a name in ``whole``.
    """
    parts = name.split(".")
    wrapped = [place for place, part in enumerate(parts) if part in WRAPPERS]
    for count in range(len(wrapped) + 1):
        for out in combinations(wrapped, count):
            name_left = ".".join(p for place, p in enumerate(parts) if place not in out)
            if name_left in whole:
                return name_left
    return name


@dataclass(frozen=True)
class LocalPart:
    """A part of a tensor on this rank."""

    tensor: Tensor
    """Tensor that the workload gave; a DTensor is not unpacked."""
    places: NDArray[np.int64]
    """Position of each local element in the flat full tensor."""


def read_local_parts(
    workload: ResolvedWorkload, call: str, given: Any, whole: Mapping[str, Tensor]
) -> dict[str, LocalPart]:
    """Read the result of ``weights`` or ``gradients``.

    Args:
        workload: the workload.
        call: name of the method, ``weights`` or ``gradients``.
        given: result of that method: name -> tensor, DTensor or (tensor, slices). Names
            whose value is None are skipped.
        whole: the model's parameters by name.

    Raises:
        WorkloadError: for unknown names, and for tensors whose shape does not fit their
            slices.
    """
    parts: dict[str, LocalPart] = {}
    for name, value in by_full_name(workload, call, given, whole).items():
        pair = isinstance(value, tuple | list) and len(value) == 2
        if call == "gradients" and pair and value[0] is None:
            continue  # there is no gradient of these slices
        if value is not None:
            parts[name] = _local_part(workload, call, name, value, whole[name].shape)
    return parts


def by_full_name(
    workload: ResolvedWorkload, call: str, given: Any, whole: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Rename values from names of wrapped parameters to names of the model.

    Raises:
        WorkloadError: if the model has no such name, or a name occurs twice.
    """
    if not isinstance(given, Mapping):
        text = f"returned {type(given).__name__}, expected a dict of name -> tensor"
        raise workload.refuse(call, text)
    value_by_name: dict[str, Any] = {}
    for key, value in given.items():
        name = full_name(str(key), whole)
        if name not in whole:
            raise workload.refuse(
                call, f"gave {key!r}, {_unknown(workload, name, whole, given)}"
            )
        if name in value_by_name:
            raise workload.refuse(call, f"gave {name} twice")
        value_by_name[name] = value
    return value_by_name


def _unknown(
    workload: ResolvedWorkload,
    name: str,
    whole: Mapping[str, Tensor],
    given: Mapping[str, Any],
) -> str:
    with torch.random.fork_rng(devices=[]):
        model = workload.model()
    parameter_by_name = dict(model.named_parameters(remove_duplicate=False))
    first = {p: n for n, p in model.named_parameters()}
    if (tied := parameter_by_name.get(full_name(name, parameter_by_name))) is not None:
        text = f"which is tied to {first[tied]} in model()"
        if first[tied] not in {full_name(str(key), whole) for key in given}:
            return f"{text}: give it by that name, on every rank"
        return (
            f"{text}, beside {first[tied]} itself: if the layout has made two "
            "parameters of them, tie them again in parallelize; if they are still one, "
            "give that name alone"
        )
    text = "which is not in the model: expected names of model(), such as"
    return f"{text} {', '.join([*whole][:4])}"


def _local_part(
    workload: ResolvedWorkload, call: str, name: str, value: Any, shape: torch.Size
) -> LocalPart:
    expected = f"expected a tensor of shape {list(shape)}, or (tensor, slices of it)"
    if isinstance(value, Tensor):
        if value.shape != shape:
            text = f"gave {name} with shape {list(value.shape)}, {expected}"
            raise workload.refuse(call, text)
        places, n_local = numbers_laid_out_as(value), local(value).numel()
        if len(places) != n_local:
            raise workload.refuse(
                call,
                f"gave {name} as a DTensor with {n_local} local elements, and "
                f"{len(places)} by its placements: for an uneven layout of your own "
                "give (its local tensor, slices of the whole)",
            )
        return LocalPart(value, places)
    pair = isinstance(value, tuple | list) and len(value) == 2
    if not pair or not isinstance(value[0], Tensor) or isinstance(value[0], DTensor):
        raise workload.refuse(
            call, f"gave {name} as {type(value).__name__}, {expected}"
        )
    tensor, slices = value
    slices = (slices,) if isinstance(slices, slice) else slices
    if not isinstance(slices, tuple | list) or not all(
        isinstance(s, slice) for s in slices
    ):
        raise workload.refuse(call, f"gave {name} with slices {slices!r}, {expected}")
    numbers = torch.arange(shape.numel())
    parts = [numbers.view(shape)[tuple(slices)]] if len(slices) <= len(shape) else []
    # one slice may be of the flat tensor, too; the number of elements decides
    if len(slices) == 1:
        parts.insert(0, numbers[slices[0]])
    fitting = [part for part in parts if part.numel() == tensor.numel()]
    if not fitting:
        sizes = " or ".join(str(part.numel()) for part in parts)
        what = f"have {sizes}" if parts else f"are of {len(slices)} dims"
        raise workload.refuse(
            call,
            f"gave {name} with {tensor.numel()} elements, and its slices {slices!r} "
            f"{what}: {expected}",
        )
    return LocalPart(tensor, fitting[0].reshape(-1).numpy())


def check_values(
    workload: ResolvedWorkload,
    parts: Mapping[str, LocalPart],
    values: Mapping[str, Tensor],
) -> None:
    """Check that a model was laid out with its initial values.

    Args:
        workload: the workload.
        parts: this rank's parts of the parameters right after ``parallelize``.
        values: values of the whole parameters.

    Raises:
        WorkloadError: names the parameter that has other values.
    """
    for name, part in parts.items():
        if part.tensor.dtype != values[name].dtype:
            text = f"gave {name} as {part.tensor.dtype}: {FP32}"
            raise workload.refuse("weights", text)
        now = local(part.tensor.detach()).reshape(-1).cpu()
        true = values[name].reshape(-1).cpu()[torch.from_numpy(part.places)]
        if len(now) != len(true):
            raise workload.refuse("parallelize", OTHERWISE)
        if not torch.equal(now, true):
            wrong = int((now != true).sum())
            text = (
                f"changed the values of {name}: {wrong} of {len(true)} elements on "
                "this rank are not those of model()"
            )
            for narrow in (torch.bfloat16, torch.float16):
                if torch.equal(now, true.to(narrow).to(now.dtype)):
                    text += f" but those rounded to {narrow}: have model() round them"
            raise workload.refuse("parallelize", text)
