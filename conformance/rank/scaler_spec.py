"""Load scalers named ``module:attribute``; reject those that lack methods."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...fixtures import named
from ...fixtures.imports import look_in
from ...multiprocess import WorldError
from ..status import UsageError, as_usage

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ...multiprocess.cluster import BaseCluster

__all__ = [
    "CONSTRUCTOR",
    "METHODS",
    "NO_SCALER",
    "ScalerProtocol",
    "growth_tracker",
    "lacking",
    "load_scaler",
    "refuse_mixed",
    "refuse_unfit",
]

NO_SCALER = "none"
"""Name for training without a scaler, which checks the training setup alone."""

PAGE = "docs/check-a-scaler.md"


class ScalerProtocol(Protocol):
    """Methods that gradparity calls on a scaler; see docs/check-a-scaler.md.

    ``torch.amp.GradScaler`` has all of these methods.
    """

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or each of a list of losses, by the scale."""

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, once and before ``step``."""

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, or skip if a gradient on any rank is not finite."""

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale, or set it to ``new_scale``."""

    def get_scale(self) -> float:
        """Return the scale as a Python float."""

    def state_dict(self) -> dict[str, Any]:
        """Return a state for ``load_state_dict``.

        ``_growth_tracker`` is read if it exists. ``torch.load(weights_only=True)`` must
        be able to read the state back.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state."""


METHODS = tuple(name for name in vars(ScalerProtocol) if not name.startswith("_"))
"""Methods that a tested scaler must have."""
CONSTRUCTOR: dict[str, Any] = {
    "device": "cpu",
    "init_scale": 2.0**10,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "enabled": True,
}
"""Keyword arguments of a tested scaler's constructor, with typical values."""


@as_usage(ValueError)
def load_scaler(spec: str, folder: str) -> Any:
    """Return the class or factory named ``module:attribute``; None for ``none``.

    Args:
        spec: for example ``torch.amp:GradScaler``.
        folder: folder to append to the import path, for a user's own module.

    Raises:
        UsageError: if ``spec`` has another form, or its object does not accept the
            keyword arguments of a scaler.
    """
    look_in(folder)
    if spec == NO_SCALER:
        return None
    factory = named("scaler", spec, "torch.amp:GradScaler")
    if not callable(factory):
        raise UsageError(f"scaler {spec!r} is not callable: {factory!r}")
    try:
        signature = inspect.signature(factory)
    except ValueError:  # the signature of some functions in C is unknown
        return factory
    try:
        signature.bind(**CONSTRUCTOR)
    except TypeError as error:
        raise _unfit(spec, f"takes {signature}: {error}") from None
    return factory


def _unfit(spec: str, text: str) -> UsageError:
    return UsageError(
        f"scaler {spec!r} cannot be checked: it {text}; what it must offer is in {PAGE}"
    )


def refuse_unfit(
    ranks: BaseCluster, spec: str, folder: str, device: str = "cpu"
) -> None:
    """Raise before anything runs if a scaler cannot be made or lacks a method.

    Args:
        ranks: cluster on which the scaler is constructed: it may need a process group.
        spec: ``module:attribute``, or ``none``.
        folder: import path of the scaler.
        device: type of the device that the scaler is for.

    Raises:
        UsageError: names the error of the constructor, or the missing methods.
    """
    if spec == NO_SCALER:
        return
    try:
        lack = ranks.run(lacking, spec, folder, device)[0]
    except WorldError as failure:
        lack = "cannot be constructed: " + " ".join(failure.root.headline.split())
    if lack:
        raise _unfit(spec, lack)


def lacking(spec: str, folder: str, device: str) -> str:
    """Describe an error of a scaler's constructor, or its missing methods.

    Returns "" if the scaler has all methods of :class:`ScalerProtocol`.
    """
    factory = load_scaler(spec, folder)
    try:
        scaler = factory(**CONSTRUCTOR | {"device": device})
    except Exception as error:  # any error: the constructor is the user's code
        text = f"cannot be constructed: {type(error).__name__}: {error}"
        if isinstance(error, ImportError):
            text += ": install it (for adapters: pip install '.[peers]' in a checkout)"
        return text
    missing = [m for m in METHODS if not callable(getattr(scaler, m, None))]
    return f"has no method {', '.join(missing)}" if missing else ""


def growth_tracker(state_dict: Mapping[str, Any]) -> int | None:
    """Return the growth tracker in a scaler's state, or None."""
    tracker = state_dict.get("_growth_tracker")
    return None if tracker is None else int(tracker)


def refuse_mixed(specs: Sequence[str]) -> None:
    """Raise if ``none`` is named together with scalers.

    Raises:
        UsageError: says that ``none`` trains in other scenarios than scalers.
    """
    if NO_SCALER in specs and len(set(specs)) > 1:
        raise UsageError(
            f"--scaler {NO_SCALER} trains in other scenarios than a scaler: give no "
            "other --scaler beside it"
        )
