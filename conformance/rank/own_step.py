"""The step of a workload that trains by itself, observed from outside.

``train_step`` makes the passes, the clipping and the step, so the judge cannot act
between them as in its own loop. It acts inside: ``train_step`` gets the scaler behind a
thin object that watches its calls and plants faults, and hooks that torch calls for
every optimizer show which gradients are used.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...fixtures import (
    Batch,
    CannotError,
    ResolvedFault,
    ResolvedWorkload,
    WorkloadError,
    inject,
    inject_loss,
    local,
)
from ..space.facts import clip_norm_of
from ..space.scenario import Scenario
from .engine import Engine
from .judged import Judged, JudgedError
from .local_parts import by_full_name, read_local_parts
from .observe import (
    CallLog,
    digest,
    non_finite,
    optimizer_digest,
    partial_ranks,
    scheduled,
)
from .recording import (
    digests_of,
    floats,
    global_batch,
    grad_scale_of,
    local_gradients,
    record_effect,
    record_gradient,
    recording_draws,
    recording_reductions,
)
from .trace import Average, Decision, RankTrace, Restored, Setting, StepTrace
from .values import by_value
from .watched import OptimizerCalls, WatchedScaler, parameters_of

__all__ = ["OwnStep", "clip_norm_handed"]


@contextmanager
def clip_norm_handed(scenario: Scenario) -> Iterator[None]:
    """Have ``train_step`` clip to the norm of a recipe that clips by one.

    Raises:
        CannotError: if nothing in the stack takes its norm from the workload.
    """
    workload, training = scenario.workload, scenario.parsed_recipe.training
    norm = clip_norm_of(workload, training) if training.clip == "norm" else None
    if workload.clipping_to is None or norm is None:
        yield
        return
    with workload.clipping_to(norm) as reads:
        yield
    if not reads.count:
        text = "neither parallelize nor train_step reads clip_norm of the workload"
        raise CannotError(f"recipe {scenario.recipe!r}: {text}: it cannot be changed")


def as_number(workload: ResolvedWorkload, what: str, value: Any) -> float | None:
    """A loss or a norm that ``train_step`` returned.

    Raises:
        WorkloadError: if it is no number.
    """
    if value is None:
        return None
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.detach()
        value = (value.full_tensor() if isinstance(value, DTensor) else value).item()
    if not isinstance(value, int | float):
        text = f"returned {value!r:.80} as the {what}, expected a number or None"
        raise workload.refuse("train_step", text)
    return float(value)


_CHECKPOINT = ("save_checkpoint", "load_checkpoint")


def _is_of_none(error: BaseException | None) -> bool:
    """Whether an attribute of None was asked for, as of a scaler that is not there."""
    while error is not None:
        if isinstance(error, AttributeError) and error.name and error.obj is None:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _scaler_at_fault() -> Iterator[None]:
    """Inside a workload's call: what a call of the scaler raised is the scaler's."""
    try:
        yield
    except WorkloadError as error:
        if isinstance(error.__cause__, JudgedError):
            raise error.__cause__ from None
        raise


def _both(before: Any, after: Any) -> Any:
    return None if before is None or after is None else (before, after)


class OwnStep:
    """Runs ``train_step`` and sees the same of it as of the judge's own loop."""

    def __init__(self, engine: Engine, judged: Judged) -> None:
        self.engine = engine
        self.judged = judged
        self.workload = engine.scenario.workload
        self.calls = OptimizerCalls(self.workload, self._record_gradients)
        self.seen = StepTrace(step=-1)
        self.faults: tuple[ResolvedFault, ...] = ()
        self.non_finite: dict[str, bool] | None = None
        """Name -> whether its raw gradient is bad; None until a scaler reads them."""
        self.unknown = engine.owned[0]
        """Names whose optimizer was not seen yet, or steps copies of the parameters."""
        self.handed: list[list[str]] = []
        """Names of what a scaler was handed; optimizers inside of it decide with it."""
        self.given: list[Optimizer] = []
        """What a scaler was handed in this step."""
        self.copied: dict[int, list[dict[str, Setting]]] = {}
        """Optimizers that step copies, by identity -> settings of their param groups in
        this step."""
        self.called: list[list[str]] = []
        self.found: list[str] = []
        """Digests of optimizers that were first seen in this step, before they step."""
        self.scaled = self.parts = 0
        self.container: list[str] = []
        """Names of the optimizer that others may be inside of."""
        self.contained: set[str] = set()
        """Names of all optimizers that had others inside."""
        self.inside: set[str] = set()
        """Names of those others."""
        self.copies_gradients = 0.0
        """Sum of squares of the gradients of copies, which an optimizer steps."""
        self.steps_copies = False
        """Whether it has stepped them with other gradients than the parameters have."""
        self.excused = False
        """Whether some step has moved weights, or had a gradient that is not finite."""

    def run(self, seen: StepTrace, faults: tuple[ResolvedFault, ...]) -> None:
        """Train one step with the faults that are due in it; fills ``seen``."""
        engine, judged, workload = self.engine, self.judged, self.workload
        self.seen, self.faults, self.non_finite = seen, faults, None
        self.called.clear()
        self.given.clear()
        self.copied.clear()
        self.found.clear()
        self.scaled = 0
        self.copies_gradients = 0.0
        micro_batches = engine.micro_batches(global_batch(engine, seen.step))
        self.parts = len(micro_batches)
        seen.scale_before, seen.growth_before = judged.state()
        before, log = digests_of(engine), CallLog()
        was = self._says()
        precision = engine.scenario.parsed_precision
        autocast = precision.autocast(engine.device.type)
        with self.calls.watching(), autocast, recording_draws(engine, seen):
            # a cast weight that is kept has the graph of the backward before: what a
            # later micro-batch adds to it would be lost
            torch.set_autocast_cache_enabled(False)
            loss, norm = self._train(micro_batches, log)
        seen.collectives = log.collectives
        seen.loss = as_number(workload, "loss", loss)
        seen.reported_norm = as_number(workload, "norm", norm)
        seen.weight = engine.weight_of(micro_batches)
        now = self._says()
        seen.schedule, seen.average, seen.skips = map(_both, was, now)
        seen.scale_after, seen.growth_after = judged.state()
        if workload.gradients is not None:
            self._keep_given_gradients()
        else:
            self._leave_out_unused()
        self._decide()
        owned = [self._enter(optimizer) for optimizer in engine.optimizers]
        # by identity: two optimizers may have equal lists of names
        numbers = {id(names): number for number, names in enumerate(engine.owned)}
        deciding = [numbers.get(id(names)) for names in owned]
        before = before[0], [*before[1], *self.found]
        record_effect(engine, seen, before, deciding)
        changed = [d.parameters_changed for d in seen.decisions]
        # a loss scaling of the stack's own may skip, for what only other ranks see
        moved = self.calls.seen > 0 or False not in changed
        self.excused |= judged.scaler is not None or moved or bool(seen.non_finite)

    def check_stepped(self) -> None:
        """See that the stack has stepped, or had a reason not to, in some step."""
        excused = torch.tensor(float(self.excused), device=self.engine.device)
        dist.all_reduce(excused)
        if not excused:
            text = "stepped never: no optimizer of torch was called, no weight has"
            raise self.workload.refuse("train_step", f"{text} changed in any step")

    def check_gradients(self, trace: RankTrace) -> None:
        """See that the gradients of a whole run were not out of sight.

        Raises:
            CannotError: if a stack that makes its parameters anew trains those that the
                recipe has frozen.
        """
        engine, frozen = self.engine, self.engine.scenario.parsed_recipe.training.frozen
        for name in engine.index if frozen and engine.gives_weights else ():
            found = [s.gradients[name] for s in trace.steps if name in s.gradients]
            if name not in engine.trained and any(g.any() for g in found):
                text = "frozen parameters train again once parallelize is done"
                raise CannotError(f"{text}: {name}")
        decisions = [d for seen in trace.steps for d in seen.decisions]
        # without gradients an optimizer moves nothing: then they are not hidden
        called = any(d.optimizer_called and d.parameters_changed for d in decisions)
        hidden = self.workload.gradients is None and not any(
            seen.gradients for seen in trace.steps
        )
        if self.steps_copies:  # the law says that nothing could be compared, and why
            return
        if hidden and called and any(map(self.engine.trains, self.engine.index)):
            text = "an optimizer was called, and no parameter had a grad: write"
            raise self.workload.refuse("gradients", f"{text} gradients(stack)")

    def _train(self, micro_batches: list[Batch], log: CallLog) -> tuple[Any, Any]:
        assert self.workload.train_step is not None
        scaler = self.judged.scaler
        if scaler is not None:
            scaler = WatchedScaler(
                scaler,
                watch=partial(self._watch, log),
                inject=self._inject_loss,
                before=self._before_scaler_call,
                new_scale=self.judged.manual_scale(self.seen.step),
            )
        with _scaler_at_fault(), recording_reductions(self.engine, self.seen):
            return self.workload.train_step(self.engine.module, micro_batches, scaler)

    def _says(self) -> tuple[str | None, Average | None, int | None]:
        """The stack's schedule, average and count of skips, where it gives them."""
        workload, stack = self.workload, self.engine.module
        schedule = workload.lr_schedule and by_value(workload.lr_schedule(stack))
        average = None
        if workload.ema is not None:
            given = by_full_name(
                workload, "ema", workload.ema(stack), self.engine.whole
            )
            parts = {n: local(p.detach()) for n, p in given.items()}
            average = {n: (part.numel(), digest(part)) for n, part in parts.items()}
            if workload.one_rank:
                self.seen.averages = {
                    name: floats(part)
                    for name, part in parts.items()
                    if part.numel() == len(self.engine.index.get(name, ()))
                }
        count = workload.skipped_steps
        skips = None if count is None else int(count(stack))
        return schedule, average, skips

    def restored(self) -> Restored | None:
        """Save and load by the stack's own means, the latter with a new scaler."""
        workload, judged = self.workload, self.judged
        if workload.save_checkpoint is None or judged.scaler is None:
            return None
        with self._checkpoint() as load:
            saved = judged.state()
            judged.construct(judged.factory)
            new = judged.state()
            load()
            loaded = judged.state()
        return Restored(saved=saved, loaded=loaded, new=new)

    def resume(self) -> tuple[int, str]:
        """Go on with a new stack, loaded from the old one's own checkpoint.

        Returns:
            The number of weights that the load restored; the first that is another one.

        Raises:
            CannotError: if the checkpoint has no weights, or needs a scaler and there
                is none.
            WorkloadError: if saving has changed the weights.
        """
        engine, judged = self.engine, self.judged
        held = self._weights()
        try:
            with self._checkpoint() as load:
                saved = self._weights()
                engine.replace_stack()
                made = self._weights()
                if judged.scaler is not None:
                    judged.construct(judged.factory)
                load()
        except WorkloadError as error:
            if error.call in _CHECKPOINT and _is_of_none(error):
                raise CannotError(f"without a scaler: {error}") from error
            raise
        engine.find_parameters()
        loaded = self._weights()
        # moved: weights that training had changed; back: those that the load restored
        moved = [name for name in held if held[name] != made[name]]
        back = [name for name in moved if loaded[name] != made[name]]
        # over all ranks: one may hold nothing, and all must raise together
        counts = torch.tensor(
            [len(moved), len(back), int(saved != held)], device=engine.device
        )
        dist.all_reduce(counts)
        if counts[2]:
            text = "changed the weights that it saves: training would go on from others"
            raise self.workload.refuse("save_checkpoint", text)
        if counts[0] and not counts[1]:
            text = "load_checkpoint leaves the weights of a new stack as they are made"
            raise CannotError(f"recipe {engine.scenario.recipe!r}: {text}")
        lost = [name for name in moved if loaded[name] != saved[name]]
        return len(moved) - len(lost), (lost or [""])[0]

    def _weights(self) -> dict[str, str]:
        return {n: digest(part) for n, part in self.engine.local_tensors().items()}

    @contextmanager
    def _checkpoint(self) -> Iterator[Callable[[], None]]:
        """Save the stack; yields what loads it into the stack that is there then."""
        save, load = self.workload.save_checkpoint, self.workload.load_checkpoint
        assert save is not None and load is not None
        first = dist.get_rank() == 0
        # one folder for all: its name is random, so rank 0 chooses it
        folder = [tempfile.mkdtemp(prefix="gradparity-") if first else ""]
        dist.broadcast_object_list(folder)

        def loads() -> None:
            with _scaler_at_fault():
                load(self.engine.module, self._merely_watched(), folder[0])

        try:
            with _scaler_at_fault():
                save(self.engine.module, self._merely_watched(), folder[0])
            dist.barrier()  # rank 0 may write for all
            yield loads
            dist.barrier()  # a rank may still read
        finally:
            if first:
                shutil.rmtree(folder[0], ignore_errors=True)

    def _merely_watched(self) -> WatchedScaler | None:
        if self.judged.scaler is None:
            return None
        return WatchedScaler(
            self.judged.scaler,
            watch=self.judged.watch,
            inject=lambda loss: loss,
            before=lambda _: None,
            new_scale=None,
        )

    @contextmanager
    def _watch(self, log: CallLog, call: str) -> Iterator[None]:
        with self.judged.watch(call):
            if call in ("unscale_", "clip_grad_norm_", "step", "update"):
                with log:
                    yield
            else:
                yield

    def _inject_loss(self, loss: Tensor) -> Tensor:
        where, at = (dist.get_rank(), self.seen.step), (self.scaled, self.parts)
        self.scaled += 1
        loss, injected = inject_loss(self.faults, loss, where, at)
        self.seen.faults += injected
        return loss

    def _before_scaler_call(self, optimizer: Any) -> None:
        """Inject faults and read the raw gradients, once a step."""
        names = self._enter(optimizer)
        # by identity: two optimizers may have equal lists of names
        if not any(names is known for known in self.handed):
            self.handed.append(names)
        if isinstance(optimizer, Optimizer):
            self.given.append(optimizer)
            self._record_settings(optimizer, names)
        if self.non_finite is None:
            engine, seen = self.engine, self.seen
            gradients = local_gradients(engine)
            seen.faults += inject(self.faults, gradients, dist.get_rank(), seen.step)
            self.non_finite = {
                name: non_finite(gradient, seen.scale_before)
                for name, gradient in gradients.items()
            }

    def _enter(self, optimizer: Any) -> list[str]:
        """Names of an optimizer's parameters; a new one decides for itself.

        [Note: Optimizers that are found]
        The judge is not given a stack's optimizers: it finds one when a scaler receives
        it, or when it steps. ``engine.owned`` has a list of names for each decision.
        The first list are the names without a known optimizer; one that is found takes
        its names out of it and gets a list at the end, so that decisions keep their
        numbers from step to step. Two kinds get no list:
        - an optimizer without known parameters, such as one of fp32 copies, decides for
          the first list;
        - an optimizer of some parameters of one that the scaler has received is inside
          that one, and skips with it.
        """
        engine, mine = self.engine, {id(p) for p in parameters_of(optimizer)}
        if isinstance(optimizer, torch.optim.Optimizer) and not any(
            optimizer is known for known in engine.optimizers
        ):
            engine.optimizers.append(optimizer)
            self.found.append(optimizer_digest(optimizer))
        names = [n for n, p in engine.parameters.items() if id(p) in mine]
        if not names:
            return self.unknown
        for owned in engine.owned:
            if owned == names and owned is not self.unknown:
                return owned
        for owned in self.handed:
            # inside of an optimizer that the scaler was handed: it skips with that one
            if set(names) < set(owned) and owned is not self.unknown:
                return owned
        # in place: engine.owned[0] is this very list
        self.unknown[:] = [n for n in self.unknown if n not in names]
        engine.owned.append(names)
        return names

    def _record_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what an optimizer uses, at the moment it is called."""
        engine, seen = self.engine, self.seen
        names = self._enter(optimizer)
        self.called.append(names)
        if self.calls.is_inside(optimizer):
            self.contained.update(self.container)
            self.inside.update(names)
        else:
            self.container = names
        if self.calls.is_late:
            seen.late += names
        # inside of the scaler's call it may be the scaler that has changed them
        if not any(optimizer is given for given in self.given):
            self._record_settings(optimizer, names)
        if self.workload.gradients is not None:
            return
        scale, gradients = grad_scale_of(optimizer), local_gradients(engine)
        if names is self.unknown:
            self.copies_gradients += sum(
                float(np.square(floats(local(p.grad) / scale), dtype=np.float64).sum())
                for p in parameters_of(optimizer)
                if p.grad is not None
            )
        for name in names:
            # once: a container and the optimizer inside of it use the same gradient
            if name in gradients and name not in seen.gradients:
                record_gradient(engine, seen, name, gradients[name], scale)

    def _record_settings(
        self, optimizer: torch.optim.Optimizer, names: list[str]
    ) -> None:
        """Note with which settings an optimizer steps each parameter."""
        groups = [(scheduled(g), g["params"]) for g in optimizer.param_groups]
        if names is self.unknown:
            self.copied[id(optimizer)] = [settings for settings, p in groups if p]
            self.seen.copies = [s for held in self.copied.values() for s in held]
            return
        every = {id(p): settings for settings, params in groups for p in params}
        stepped = {id(p) for p in parameters_of(optimizer) if p.grad is not None}
        for name in names:
            held = id(self.engine.parameters[name])
            # an optimizer whose parameters have no grad keeps its own gradients
            if not stepped or held in stepped:
                self.seen.settings[name] = every[held]

    def leave_to_owners(self, trace: RankTrace) -> None:
        """Forget the gradients that only optimizers inside of others on ranks use.

        In ZeRO-1 an optimizer has all parameters, and the one inside of it this rank's.
        Gradients may be reduced to the rank that uses them: elsewhere they are left as
        backward made them. What no rank has inside, the container steps itself.
        """
        found: list[Any] = [None] * dist.get_world_size()
        mine = {(name, trace.shards[name]) for name in self.inside}
        dist.all_gather_object(found, mine)
        used = set().union(*found)
        for name in self.contained - self.inside:
            if (name, trace.shards[name]) in used:
                for seen in trace.steps:
                    for held in (seen.gradients, seen.places, seen.partial):
                        held.pop(name, None)

    def _leave_out_unused(self) -> None:
        """Forget the gradients of parameters whose copies were stepped with others.

        An engine may reduce gradients into its own buffers, step its shards of copies
        of the parameters with them, and leave the result of backward in ``.grad``.
        """
        seen = self.seen
        held = [name for name in self.unknown if name in seen.gradients]
        squares = (np.square(seen.gradients[n], dtype=np.float64) for n in held)
        size = float(sum(found.sum() for found in squares))
        # the same numbers in another order of summation: in fp32, over 2^14 of them
        same = 2.0**14 * 2.0**-24
        if held and not np.isclose(self.copies_gradients, size, rtol=same, atol=0.0):
            self.steps_copies = True
            for name in held:
                del seen.gradients[name], seen.places[name], seen.partial[name]

    def _keep_given_gradients(self) -> None:
        engine, seen = self.engine, self.seen
        assert self.workload.gradients is not None
        given = self.workload.gradients(engine.module)
        for name, part in read_local_parts(
            self.workload, "gradients", given, engine.whole
        ).items():
            seen.places[name] = part.places
            seen.partial[name], parts = partial_ranks(part.tensor)
            seen.gradients[name] = floats(local(part.tensor) / parts)

    def _decide(self) -> None:
        """What each optimizer did; parameters whose optimizer is not known go first."""
        seen, bad = self.seen, dict(self.non_finite or {})
        if not self.unknown and not seen.step:  # later their numbers are in use
            del self.engine.owned[0]
        for name, values in seen.gradients.items():
            if name not in bad:
                bad[name] = not np.isfinite(values).all()
        seen.decisions = [
            Decision(
                non_finite=[n for n in names if bad.get(n)],
                optimizer_called=any(names is called for called in self.called),
            )
            for names in self.engine.owned
        ]
