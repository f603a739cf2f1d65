"""Observe one step of a workload's ``train_step``.

``train_step`` runs forward, backward, clipping and the optimizer, so gradparity cannot
act between them as in its own loop. Instead it passes the scaler inside a thin wrapper
that observes its calls and plants faults. Hooks that torch calls for every optimizer
show which gradients are used. All of this is recorded as :class:`Events`, from which
``fold`` later derives which optimizers decide together and what they step.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...fixtures import (
    REFERENCE_LINE,
    CannotError,
    ResolvedFault,
    ResolvedWorkload,
    UndecidedError,
    WorkloadError,
    inject_loss,
    local,
)
from ...multiprocess.rank.global_state import seed_everything
from ..space.facts import clip_norm_of
from ..space.scenario import Scenario
from .buffers import digests_of_buffers
from .engine import Engine
from .events import Events
from .fold import steps_again
from .layout import replace_stack
from .local_parts import by_full_name, read_local_parts
from .modules import modules_in
from .observe import (
    CallLog,
    digest,
    dtype_name,
    optimizer_digest,
    partial_ranks,
)
from .recording import (
    digests_of,
    floats,
    global_batch,
    plant_and_read,
    record_effect,
    recording_draws,
    recording_reductions,
)
from .scaler_under_test import ScalerUnderTest, StoppedError
from .trace import Average, Kind, RankTrace, Restored, StepTrace
from .values import by_value
from .watched import WatchedScaler, watching_optimizers

__all__ = ["OwnStep", "clip_norm_handed"]


@contextmanager
def clip_norm_handed(scenario: Scenario) -> Iterator[None]:
    """Make ``train_step`` clip to the recipe's norm inside this context.

    Raises:
        UndecidedError: if the clipping function does not take its norm from the
            workload.
    """
    workload, training = scenario.workload, scenario.parsed_recipe.training
    norm = clip_norm_of(workload, training) if training.clip == "norm" else None
    if workload.clipping_to is None or norm is None:
        yield
        return
    with workload.clipping_to(norm) as reads:
        yield
    if not reads.count:
        raise UndecidedError(
            f"recipe {scenario.recipe!r}: neither parallelize nor train_step reads "
            "clip_norm of the workload, so it clips to another norm, which may be "
            "larger than every gradient: clip to self.clip_norm"
        )


def as_number(workload: ResolvedWorkload, what: str, value: Any) -> float | None:
    """Convert a loss or a norm that ``train_step`` returned to a float, or keep None.

    Raises:
        WorkloadError: if the value is neither None nor a number.
    """
    if value is None:
        return None
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.detach()
        value = (value.full_tensor() if isinstance(value, DTensor) else value).item()
    # numbers of numpy are not of type int or float
    if not isinstance(value, Real):
        text = f"returned {value!r:.80} as the {what}, expected a number or None"
        raise workload.refuse("train_step", text)
    return float(value)


_CHECKPOINT = ("save_checkpoint", "load_checkpoint")


def _is_of_no_scaler(error: BaseException | None) -> bool:
    """Return True if an error says that None lacks an attribute of a scaler."""
    while error is not None:
        if isinstance(error, AttributeError) and error.obj is None and error.name:
            if hasattr(torch.amp.GradScaler, error.name):
                return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _scaler_at_fault() -> Iterator[None]:
    """Raise ``StoppedError`` itself if it caused a ``WorkloadError``.

    An error of the tested scaler is then not reported as one of the workload.
    """
    try:
        yield
    except WorkloadError as error:
        if isinstance(error.__cause__, StoppedError):
            raise error.__cause__ from None
        raise


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Make autocast cast each weight anew, also if autocast is off here.

    A cached cast of a weight belongs to the graph of the previous backward: gradients
    of a later micro-batch would be lost.
    """
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


def _both(before: Any, after: Any) -> Any:
    return None if before is None or after is None else (before, after)


class OwnStep:
    """Runs ``train_step``, and records what gradparity's own loop records."""

    def __init__(
        self, engine: Engine, tested: ScalerUnderTest, files: str | None
    ) -> None:
        self.engine = engine
        self.tested = tested
        self.files = files
        self.workload = engine.scenario.workload
        self.excused = False
        """True if :meth:`check_stepped` must not fail. A step sets the flag if there is
        a scaler, an optimizer of torch was called, weights moved, a gradient was not
        finite, or this rank trains nothing."""

    def run(self, seen: StepTrace, faults: tuple[ResolvedFault, ...]) -> None:
        """Train one step with its planned faults; fill ``seen``."""
        engine, tested, workload = self.engine, self.tested, self.workload
        micro_batches = engine.micro_batches(global_batch(engine, seen.step))
        seen.scale_before, seen.growth_before = tested.state()
        before, log = digests_of(engine)[0], CallLog()
        events = Events(engine, seen)
        was = self._says(seen)
        precision = engine.scenario.parsed_precision
        autocast = precision.autocast(engine.device.type)
        with (
            watching_optimizers(events.note),
            autocast,
            _no_autocast_cache(),
            recording_draws(engine, seen),
        ):
            scaler = self._watched(events, faults, len(micro_batches), log)
            with _scaler_at_fault(), recording_reductions(engine, seen):
                assert workload.train_step is not None
                loss, norm = workload.train_step(engine.module, micro_batches, scaler)
        self._check_events(seen)
        seen.collectives = log.collectives
        seen.loss = as_number(workload, "loss", loss)
        if isinstance(loss, Tensor) and loss.is_floating_point():
            seen.loss_dtype = dtype_name(loss.dtype)
        seen.reported_norm = as_number(workload, "norm", norm)
        seen.weight = engine.weight_of(micro_batches)
        now = self._says(seen)
        seen.schedule, seen.average, seen.skips = map(_both, was, now)
        seen.scale_after, seen.growth_after = tested.state()
        if workload.gradients is not None:
            self._keep_given_gradients(seen)
        record_effect(engine, seen, (before, events.before))
        called = any(event.kind is Kind.BEGINS for event in seen.events)
        training = any(map(engine.trains, engine.index))
        # a stack that scales the loss itself may skip because of values on other ranks
        moved = called or bool(seen.changed) or not training
        self.excused |= tested.scaler is not None or moved or bool(seen.bad)

    def check_stepped(self) -> None:
        """Check on all ranks that ``train_step`` called an optimizer or moved a weight.

        A step with a scaler or a bad gradient may leave the weights unchanged.

        Raises:
            WorkloadError: if no step on any rank set ``excused``.
        """
        excused = torch.tensor(float(self.excused), device=self.engine.device)
        dist.all_reduce(excused)
        if not excused:
            text = "stepped never: no optimizer of torch was called, no weight has"
            raise self.workload.refuse("train_step", f"{text} changed in any step")

    def check_gradients(self, trace: RankTrace) -> None:
        """Check that parameters that the recipe froze had no gradient in the whole run.

        Only a workload with ``weights`` is checked: it may create its parameters anew.

        Raises:
            CannotError: if such a parameter had a gradient that is not zero.
        """
        engine, frozen = self.engine, self.engine.scenario.parsed_recipe.training.frozen
        for name in engine.index if frozen and engine.gives_weights else ():
            gradients = [s.gradients[name] for s in trace.steps if name in s.gradients]
            if name not in engine.trained and any(g.any() for g in gradients):
                text = "frozen parameters train again once parallelize is done"
                raise CannotError(f"{text}: {name}")

    def _watched(
        self,
        events: Events,
        faults: tuple[ResolvedFault, ...],
        parts: int,
        log: CallLog,
    ) -> WatchedScaler | None:
        """Return the scaler wrapped to observe it and plant faults; None without one.

        Args:
            events: receives the events of the step.
            faults: faults of the scenario.
            parts: number of backward passes in the step.
            log: log of collectives.
        """
        seen, scaled = events.seen, count()
        if self.tested.scaler is None:
            return None

        def injected(loss: Tensor) -> Tensor:
            where, at = (dist.get_rank(), seen.step), (next(scaled), parts)
            bad, hits = inject_loss(faults, loss, where, at)
            seen.faults += hits
            return bad

        @contextmanager
        def handing(optimizer: Any) -> Iterator[None]:
            plant_and_read(seen, faults, events.unread(optimizer))
            events.note(Kind.HANDED, optimizer)
            try:
                yield
            finally:
                events.note(Kind.RETURNED, optimizer)

        return WatchedScaler(
            self.tested.scaler,
            watch=partial(self._watch, log),
            inject=injected,
            handing=handing,
            new_scale=self.tested.manual_scale(seen.step),
        )

    def _says(self, seen: StepTrace) -> tuple[str | None, Average | None, int | None]:
        """Return what the workload reports: its schedule, average and skip count."""
        workload, stack = self.workload, self.engine.module
        schedule = workload.lr_schedule and by_value(workload.lr_schedule(stack))
        average = None
        if workload.ema is not None:
            averages = by_full_name(
                workload, "ema", workload.ema(stack), self.engine.whole
            )
            parts = {n: local(p.detach()) for n, p in averages.items()}
            average = {n: (part.numel(), digest(part)) for n, part in parts.items()}
            whole, index = self.engine.whole, self.engine.index
            seen.averages = {
                name: floats(part)
                for name, part in parts.items()
                if part.numel() in (len(index.get(name, ())), whole[name].numel())
            }
        count = workload.skipped_steps
        skips = None if count is None else int(count(stack))
        return schedule, average, skips

    def restored(self) -> Restored | None:
        """Save and load a checkpoint by the workload's methods, with a new scaler.

        Returns:
            The scaler's states, or None if the workload has no scaler or cannot save
            its state.
        """
        workload, tested = self.workload, self.tested
        if workload.save_checkpoint is None or tested.scaler is None:
            return None
        with self._checkpoint() as load:
            saved = tested.state()
            tested.construct(tested.factory)
            new = tested.state()
            load()
            loaded = tested.state()
        return Restored(saved=saved, loaded=loaded, new=new)

    def resume(self, trace: RankTrace) -> None:
        """Lay the model out anew, and load the workload's own checkpoint into it.

        Fills ``loaded`` and ``lost_buffer`` of the trace.

        Raises:
            UndecidedError: if the load restored no weight.
            CannotError: if the checkpoint needs a scaler and there is none.
            WorkloadError: if saving changed the weights, a state of an optimizer, or
                the mode of a module.
        """
        engine, tested = self.engine, self.tested
        before, moved_buffers = self._weights(), digests_of_buffers(engine)
        states = self._states()
        try:
            with self._checkpoint() as load:
                saved, states_saved = self._weights(), self._states()
                if engine.scenario.parsed_recipe.training.random:
                    # a new process, seeded as at the begin of each run
                    seed_everything(0)
                replace_stack(engine)
                new, new_buffers = self._weights(), digests_of_buffers(engine)
                if tested.scaler is not None:
                    tested.construct(tested.factory)
                load()
        except WorkloadError as error:
            if error.call in _CHECKPOINT and _is_of_no_scaler(error):
                raise CannotError(f"without a scaler: {error}") from error
            raise
        engine.find_parameters()
        loaded = self._weights()
        # moved: weights that training had changed; back: those that the load restored
        moved = [name for name in before if before[name] != new[name]]
        back = [name for name in moved if loaded[name] != new[name]]
        # over all ranks: one may hold nothing, and all must raise together
        other = [what for what, was in states.items() if states_saved.get(what) != was]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (other[:1], moved_buffers))
        changed = [what for what, _ in everyone]
        counts = torch.tensor(
            [len(moved), len(back), int(saved != before)], device=engine.device
        )
        dist.all_reduce(counts)
        if counts[2]:
            text = "changed the weights that it saves: training continues from others"
            raise self.workload.refuse("save_checkpoint", text)
        for rank, what in enumerate(changed):
            if what:
                text = f"changed {what[0]} on rank {rank}, with which training goes on"
                raise self.workload.refuse("save_checkpoint", text)
        if counts[0] and not counts[1]:
            raise UndecidedError(
                f"recipe {engine.scenario.recipe!r}: load_checkpoint restored none of "
                "the weights that training had moved: they are as parallelize made "
                "them. If the checkpoint is to hold the scaler alone, add to the "
                'workload: checkpoint = "scaler"'
            )
        lost = [name for name in moved if loaded[name] != saved[name]]
        trace.loaded = len(moved) - len(lost), (lost or [""])[0]
        now = digests_of_buffers(engine)
        for name, was in moved_buffers.items():
            # one rank may save its own value for all
            of_ranks = {buffers.get(name, was) for _, buffers in everyone}
            is_new = now.get(name) == new_buffers.get(name) != was
            if is_new or now.get(name) not in of_ranks:
                trace.lost_buffer = trace.lost_buffer or name

    def _weights(self) -> dict[str, str]:
        return {n: digest(part) for n, part in self.engine.local_tensors().items()}

    def _states(self) -> dict[str, str]:
        """Return description -> digest of what a save must not change, beside weights.

        Included are states and settings of optimizers, buffers, the mode of each module
        (train or eval), and which parameters require a gradient.
        """
        states: dict[str, str] = {}
        for n, each in enumerate(self.engine.optimizers):
            which = f"optimizer {n} ({type(each).__name__})"
            states[f"the state of {which}"] = optimizer_digest(each)
            for at, group in enumerate(getattr(each, "param_groups", ())):
                for key in group.keys() - {"params"}:
                    states[f"{key} of group {at} of {which}"] = repr(group[key])
        for root in modules_in(self.engine.module):
            for name, module in root.named_modules():
                mode = f"the mode (train or eval) of {name or 'the model'}"
                states[mode] = str(module.training)
        for name, value in digests_of_buffers(self.engine).items():
            states[f"the buffer {name}"] = value
        for name, parameter in self.engine.parameters.items():
            states[f"requires_grad of {name}"] = str(parameter.requires_grad)
        return states

    @contextmanager
    def _checkpoint(self) -> Iterator[Callable[[], None]]:
        """Save a checkpoint; yield a function that loads it."""
        save, load = self.workload.save_checkpoint, self.workload.load_checkpoint
        assert save is not None and load is not None
        first = dist.get_rank() == 0
        # the name is random, so rank 0 chooses the folder for all
        folder_name = (
            tempfile.mkdtemp(prefix="gradparity-", dir=self.files) if first else ""
        )
        folder = [folder_name]
        dist.broadcast_object_list(folder)

        def loads() -> None:
            with _scaler_at_fault():
                load(self.engine.module, self._merely_watched(), folder[0])

        with _scaler_at_fault():
            save(self.engine.module, self._merely_watched(), folder[0])
        dist.barrier()  # rank 0 may write the checkpoint of all ranks
        yield loads
        dist.barrier()  # another rank may still be reading
        # after an error other ranks may still be writing, so the folder stays
        if first:
            shutil.rmtree(folder[0], ignore_errors=True)

    def _merely_watched(self) -> WatchedScaler | None:
        if self.tested.scaler is None:
            return None
        return WatchedScaler(
            self.tested.scaler,
            watch=self.tested.watch,
            inject=lambda loss: loss,
            handing=lambda _: nullcontext(),
            new_scale=None,
        )

    @contextmanager
    def _watch(self, log: CallLog, call: str) -> Iterator[None]:
        with self.tested.watch(call), log:
            yield

    def _check_events(self, seen: StepTrace) -> None:
        """Check that the events of a step allow a comparison.

        Raises:
            WorkloadError: if a parameter was stepped twice, because one update is
                compared. Also if it is unknown which of several optimizers of copies
                must skip.
        """
        again = None if self.workload.one_rank else steps_again(seen.events)
        if again is not None:
            name = type(self.engine.optimizers[again]).__name__
            raise self.workload.refuse(
                "train_step",
                f"stepped twice in one call: {name}.step() was called again with the "
                f"same parameters; {REFERENCE_LINE}",
            )
        unknown = {
            event.optimizer
            for event in seen.events
            if event.kind is Kind.HANDED and event.groups and not event.names
        }
        if len(unknown) > 1 and seen.bad:
            raise self.workload.refuse(
                "train_step",
                f"{min(seen.bad)} is not finite, and the scaler is handed "
                f"{len(unknown)} optimizers of copies: which of them must skip? Write "
                "optimizers(stack)",
            )

    def _keep_given_gradients(self, seen: StepTrace) -> None:
        engine = self.engine
        assert self.workload.gradients is not None
        own_gradients = self.workload.gradients(engine.module)
        for name, part in read_local_parts(
            self.workload, "gradients", own_gradients, engine.whole
        ).items():
            seen.places[name] = part.places
            seen.partial[name], parts = partial_ranks(part.tensor)
            seen.gradients[name] = floats(local(part.tensor) / parts)
