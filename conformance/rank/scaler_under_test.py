"""The tested scaler, called through its public protocol and observed."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...fixtures import CannotError, OfWorkload, WorkloadError
from ..space.recipes import CLIP_NORM, MANUAL_STEP
from .engine import Engine
from .layout import remake_optimizers
from .observe import digest
from .recording import digests_of, local_gradients, next_batch
from .scaler_spec import growth_tracker
from .trace import Misuse, Problem, RankTrace, Saved

__all__ = ["ScalerUnderTest", "StoppedError"]

ReadState = Callable[[], Mapping[str, str]]
Watch = Callable[[str], AbstractContextManager[None]]


class StoppedError(Exception):
    """The run cannot continue because of the tested scaler; carries the trace.

    Either a legal call raised (``trace.problem`` says which), or a stray collective has
    corrupted the collective that is checked after each step.
    """

    def __init__(self, trace: RankTrace) -> None:
        super().__init__(trace)
        self.trace = trace

    def __str__(self) -> str:
        problem = self.trace.problem
        if problem is None:
            return f"rank {self.trace.rank}: the checked collective was corrupted"
        where = f"rank {self.trace.rank}, step {problem.step}, {problem.call}"
        return f"{where}: {problem.error}"


class ScalerUnderTest:
    """The tested scaler, called through its public protocol and observed."""

    def __init__(self, engine: Engine, trace: RankTrace) -> None:
        self.engine = engine
        self.trace = trace
        self.recipe = engine.scenario.parsed_recipe
        self.scaler: Any = None
        self.factory: Any = None

    def construct(self, factory: Any) -> None:
        """Construct the scaler with the scenario's settings."""
        scenario = self.engine.scenario
        self.factory = factory
        with self.watch("constructor"):
            self.scaler = factory(
                device=self.engine.device.type,
                init_scale=scenario.init_scale,
                growth_factor=scenario.growth_factor,
                backoff_factor=scenario.backoff_factor,
                growth_interval=scenario.growth_interval,
                enabled=self.recipe.enabled,
            )
        if self.recipe.primed:
            self.scale([torch.zeros((), device=self.engine.device)])

    def resume(self) -> None:
        """Replace optimizers and scaler by new ones that load the current states."""
        remake_optimizers(self.engine)
        if self.scaler is not None:
            saved = self.saved()
            self.construct(self.factory)
            self.load(saved)

    def saved(self) -> Saved:
        """Return the state of the tested scaler, as a checkpoint would hold it."""
        file = io.BytesIO()
        with self.watch("state_dict"):
            torch.save(self.scaler.state_dict(), file)
        return Saved(scaler=file.getvalue(), state=self.state())

    def load(self, saved: Saved) -> None:
        """Load a saved state into the tested scaler."""
        with self.watch("torch.load of its state_dict"):
            try:
                loaded = torch.load(io.BytesIO(saved.scaler), weights_only=True)
            except pickle.UnpicklingError as error:
                # torch's text begins with ways to load a file that is trusted
                _, _, why = str(error).partition("WeightsUnpickler error: ")
                raise pickle.UnpicklingError(why or str(error)) from error
        with self.watch("load_state_dict"):
            self.scaler.load_state_dict(loaded)

    @contextmanager
    def watch(self, call: str) -> Iterator[None]:
        """Return a context in which an exception of the scaler's ``call`` ends the run.

        The exception is raised as a ``StoppedError`` with the trace.
        """
        if self.trace.steps:
            self.trace.steps[-1].calls.add(call)
        try:
            yield
        # raised by the optimizer or its gradients, not by the scaler
        except WorkloadError:
            raise
        except Exception as error:  # checks report an error of the scaler
            step = self.trace.steps[-1].step if self.trace.steps else -1
            text = str(error) or "(no message)"
            self.trace.problem = Problem(
                step=step, call=call, error=f"{type(error).__name__}: {text[:400]}"
            )
            raise StoppedError(self.trace) from error

    def scale(self, losses: list[Tensor]) -> list[Tensor]:
        """Scale losses; without a scaler return them unchanged."""
        if self.scaler is None:
            return losses
        with self.watch("scale"):
            # most callers pass one loss, not a list
            if len(losses) == 1:
                return [self.scaler.scale(losses[0])]
            scaled: list[Tensor] = self.scaler.scale(losses)
        return scaled

    def state(self) -> tuple[float, int | None]:
        """Return (scale, growth tracker) as the public protocol gives them."""
        if self.scaler is None:
            return 1.0, 0
        with self.watch("get_scale"):
            scale = float(self.scaler.get_scale())
        with self.watch("state_dict"):
            return scale, growth_tracker(self.scaler.state_dict())

    def step(self) -> None:
        """Unscale and clip if the recipe says so, then step every optimizer."""
        optimizers = self.engine.optimizers
        if self.scaler is None:
            self.engine.clip()
            for optimizer in optimizers:
                with self.engine.scenario.workload.calling("optimizer"):
                    optimizer.step()
            return
        for optimizer in optimizers * self.recipe.unscale:
            with self.watch("unscale_"):
                self.scaler.unscale_(optimizer)
        if self.recipe.clips_and_steps:
            self._clip_and_step(optimizers)
            return
        self.engine.clip()
        for optimizer in optimizers:
            with self.watch("step"):
                self.scaler.step(optimizer)

    def _clip_and_step(self, optimizers: Sequence[Optimizer]) -> None:
        clip_and_step = getattr(self.scaler, "clip_and_step", None)
        if clip_and_step is None:
            raise CannotError("the scaler has no clip_and_step")
        for optimizer in optimizers:
            with self.watch("clip_and_step"):
                clip_and_step(optimizer, CLIP_NORM)

    def manual_scale(self, step: int) -> float | None:
        """Return the scale that a recipe passes to ``update`` in a step, or None."""
        return self.recipe.new_scale if step == MANUAL_STEP else None

    def update(self, step: int) -> None:
        """Call ``update`` of the tested scaler, if there is one."""
        manual = self.manual_scale(step)
        if self.scaler is not None:
            with self.watch("update"):
                # without a new scale call update(): a scaler need not accept None
                self.scaler.update(*[manual] * (manual is not None))

    def misuse(self) -> list[Misuse]:
        """Make calls in a wrong order, and return their effects.

        Returns an empty list without a scaler, with a ``train_step``, or with a recipe
        other than ``plain``. A recipe would not change these calls, so the plain run is
        enough.
        """
        scenario = self.engine.scenario
        if (
            self.scaler is None
            or scenario.recipe != "plain"
            or OfWorkload.LOOP not in scenario.workload.has
        ):
            return []
        # A new backward, for two reasons: the last gradients carry the scale before
        # update(), and a rank without a loss does not know that scale.
        last = self.engine.scenario.steps
        batch = next_batch(self.engine, last)
        self.engine.forward_backward(batch, lambda losses, *_: self.scale(losses))
        return _probe(self.scaler, self.engine.optimizers, self._digests, self.watch)

    def _digests(self) -> dict[str, str]:
        """Return digests of everything that a rejected call must not change."""
        gradients = local_gradients(self.engine).items()
        parameters, state = digests_of(self.engine)
        return {
            "parameters": repr(parameters),
            "the optimizer's state": repr(state),
            "gradients": repr({name: digest(g) for name, g in gradients}),
            "the scale or the growth tracker": repr(self.state()),
        }


# - Calls in a wrong order, after the last step


def _probe(
    scaler: Any, optimizers: Sequence[Optimizer], read_state: ReadState, watch: Watch
) -> list[Misuse]:
    """Make legal and illegal calls in turn; return the effects of the illegal ones.

    Args:
        scaler: the tested scaler, after an ``update``.
        optimizers: its optimizers; their gradients come from a backward after the
            ``update``.
        read_state: returns part -> digest of the state that a rejected call must not
            change.
        watch: context for a legal call; an error in it is the scaler's fault.
    """
    seen: list[Misuse] = []
    for misuse in _calls(scaler, optimizers, read_state, watch):
        seen.append(misuse)
        if misuse.changed or not misuse.error:
            break  # after a wrong call was accepted, no later call is known to be legal
    return seen


def _calls(
    scaler: Any, optimizers: Sequence[Optimizer], read_state: ReadState, watch: Watch
) -> Iterator[Misuse]:
    first = optimizers[0]
    yield _refused("update() before any step()", scaler.update, read_state)
    for optimizer in optimizers:
        with watch("unscale_"):
            scaler.unscale_(optimizer)
    again = "a second unscale_() before update()"
    yield _refused(again, lambda: scaler.unscale_(first), read_state)
    yield _refused(
        "step() with a closure",
        lambda: scaler.step(first, closure=lambda: 0.0),
        read_state,
    )
    for optimizer in optimizers:
        with watch("step"):
            scaler.step(optimizer)
    yield _refused(
        "a second step() before update()", lambda: scaler.step(first), read_state
    )
    yield _refused(
        "unscale_() after step()", lambda: scaler.unscale_(first), read_state
    )
    with watch("update"):
        scaler.update()


def _refused(name: str, call: Callable[[], object], read_state: ReadState) -> Misuse:
    before = read_state()
    try:
        call()
        error = ""
    # any error will do: tests of the scaler say which one it must be
    except Exception as raised:
        error = type(raised).__name__
    after = read_state()
    changed = tuple(part for part in before if before[part] != after[part])
    return Misuse(call=name, error=error, changed=changed)
