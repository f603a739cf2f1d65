"""One rank of a history: parameters, optimizers, and how each call is made on them.

The same code drives the tested scaler on a rank of the world and, for all ranks within
one process, the scalers of the oracle (`oracle`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from gradparity.conformance.rank.scaler_spec import growth_tracker
from gradparity.fixtures import local
from gradparity.multiprocess import World

from .history import BACKWARDS, FUSED, SPOILS, Call, History

__all__ = ["CLIPS", "OFFERED", "STEPS", "Replica", "norm_of"]

SLOPES = {"e": 0.5, "a": 0.25, "b": 0.125}
"""Derivative of the loss by each element."""
LARGE = 2.0**531
"""Factor of the slopes of fp64 parameters, about 1e160."""
CLIPS: dict[str, tuple[float, float]] = {
    "clip": (0.125, 2.0),
    "clip-loose": (2.0**600, 2.0),
    "clip-tiny": (1e-7, 2.0),
    "clip-order": (0.125, 64.0),
    "clip-inner": (0.125, 2.0),
    "clip-and-step": (0.125, 2.0),
}
"""Kind of call -> max_norm, norm_type."""
OFFERED = {
    **dict.fromkeys((*CLIPS, "lone-clip"), "clip_grad_norm_"),
    "clip-and-step": "clip_and_step",
    "skipped": "step_was_skipped",
    "scheduler": "step_scheduler",
}
"""Kind of call -> method that it needs and that torch's scaler lacks."""
STEPS = ("step", "retry")
PARTS = {1: (3,), 2: (2, 1), 4: (2, 1, 1, 2)}
"""World size -> elements of a sharded parameter on each rank. Of 4 ranks, the last two
hold a replica."""
PATIENCE = timedelta(seconds=30)


class _Interrupted(Exception):
    """Exception of a hook, raised before the optimizer has done anything."""


class _Around:
    """Wrapper around another optimizer, with the same groups."""

    __slots__ = ()
    optim: Any
    param_groups: Any

    def __init__(self, optim: Any) -> None:
        self.optim, self.param_groups = optim, optim.param_groups

    def step(self) -> None:
        self.optim.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)


class Duck(_Around):
    """Minimal optimizer that torch's scaler accepts: with slots, and unhashable."""

    __slots__ = ("optim", "param_groups")
    __hash__: Any = None

    def __eq__(self, other: object) -> bool:
        return self is other


class Wrapper(_Around):
    """Wraps an optimizer, as torch's PostLocalSGDOptimizer does."""


class Ring(Wrapper):
    """Wrapper to which its optimizer has a reference."""

    def __init__(self, optim: Any) -> None:
        super().__init__(optim)
        optim.wrapper = self


class Marked(torch.Tensor):
    """Tensor of a subclass, like those of memory estimators and quantizers."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.tolist:
            raise RuntimeError("this class has no storage to read from")
        plain: Any = super().__torch_function__
        return plain(func, types, args, kwargs)


class BareGroup:
    """Parameter group that offers only ``[]``."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group

    def __getitem__(self, name: str) -> Any:
        return self.group[name]


class BareGroups(Wrapper):
    """Optimizer with groups of another type than dict."""

    def __init__(self, optim: Any) -> None:
        super().__init__(optim)
        self.param_groups = [BareGroup(group) for group in optim.param_groups]


class OwnKernel(Wrapper):
    """Divides and skips by itself, as torch's kernels do, with an int in its state."""

    _step_supports_amp_scaling = True

    def __init__(self, optim: Any) -> None:
        super().__init__(optim)
        params = optim.param_groups[0]["params"]
        self.param_groups = [{"params": params, "momentum": 1.0}]  # of its own
        self.state = {"steps": 0}

    def step(self) -> None:
        if float(getattr(self, "found_inf", 0.0)):
            return
        divisor = getattr(self, "grad_scale", None)
        for parameter in self.param_groups[0]["params"] if divisor is not None else ():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        self.optim.step()


STRANGE: dict[str, Any] = {
    "own-kernel": OwnKernel,
    "ring": Ring,
    "bare-groups": BareGroups,
    "duck": Duck,
}
"""Word of a set-up -> class that wraps optimizer 0."""


class Replica:
    """One rank's side of a history.

    Attributes:
        params: parameters by name.
        optimizers: two, or none on an idle rank.
        scaler: the scaler under test.
    """

    def __init__(
        self,
        history: History,
        rank: int,
        construct: Callable[[Replica], Any],
        *,
        exact: bool = False,
        world: World | None = None,
    ) -> None:
        """Create the parameters, optimizers and scaler of a rank.

        Args:
            history: its set-up is used.
            rank: which rank this is.
            construct: makes a scaler; called again by ``reload``.
            exact: parameters in double precision, and no optimizer is fused.
            world: world of this process, if the ranks are real; else tensors are
                plain parts and there is no communication.
        """
        self.history = history
        self.words, self.size, self.rank = history.words, history.world_size, rank
        self.exact, self.world, self.construct = exact, world, construct
        self.is_last = rank == self.size - 1
        self.idle = "idle" in self.words and self.is_last
        self.mesh = None if world is None else self._mesh(world)
        self.failed = False  # in this iteration
        self.begun_anew = False  # a step of it raised
        self.renewed: set[int] = set()  # zeroed since
        self.replaced: set[int] = set()  # by gradients that no scale is in
        self.fresh: set[int] = set()  # optimizers with a backward since their step
        self.looked: set[int] = set()  # divided by unscale_ or a clip, not stepped
        self.clipped: set[int] = set()
        self.stepped: set[int] = set()
        self.ever_stepped: set[int] = set()
        self.ordered: set[int] = set()  # stepped since the ranks last loaded
        self.params: dict[str, Any] = {}
        self.optimizers: list[Any] = []
        self.kept: list[torch.Tensor] = []  # gradients that were replaced
        self.own_scale = torch.tensor(4.0)
        if not self.idle:
            names = "b" if self.lacks(0) else SLOPES
            self.params = {name: self._parameter(name) for name in names}
            self._make_optimizers()
        self.scaler = self._constructed()
        if "second-scaler" in self.words and world is not None:
            self.second = self._constructed()
            self.other = nn.Parameter(torch.zeros(1))
            self.other_optimizer = torch.optim.SGD([self.other], lr=1.0)

    # - Set-up

    def lacks(self, which: int) -> bool:
        """Return True if this rank lacks an optimizer that other ranks have."""
        return self.idle or ("lacks" in self.words and self.is_last and which == 0)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter."""
        if "complex" in self.words and name != "b":
            return torch.complex128 if self.exact else torch.complex64
        wide = self.exact or "fp64" in self.words
        return torch.float64 if wide else torch.float32

    def slope(self, name: str) -> float:
        """Return the value that a backward adds to each element of a gradient."""
        return SLOPES[name] * (LARGE if "fp64" in self.words else 1.0)

    def is_sharded(self, name: str) -> bool:
        """Return True if each rank holds a part of a parameter."""
        return "permuted" in self.words or ("dtensor" in self.words and name != "a")

    def counts(self, name: str) -> bool:
        """Return True if this rank's part counts in the global norm."""
        if "permuted" in self.words:
            return self.rank < 2
        return self.is_sharded(name) or self.rank == 0

    def _mesh(self, world: World) -> Any:
        if "permuted" in self.words:  # every rank makes both: making one is collective
            meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [3, 2])]
            return meshes[self.rank // 2]
        if "dtensor" in self.words:
            return world.mesh((world.world_size,), ("dp",))
        return None

    def _parameter(self, name: str) -> nn.Parameter:
        length = PARTS[self.size][self.rank] if self.is_sharded(name) else 3
        part = torch.zeros(length, dtype=self.dtype(name))
        if "sparse" in self.words and name != "b":
            part = part.unsqueeze(1)
        if self.mesh is None:
            return nn.Parameter(part)
        placement = Shard(0) if self.is_sharded(name) else Replicate()
        return nn.Parameter(
            DTensor.from_local(
                part,
                self.mesh,
                [placement],
                run_check=False,
                shape=torch.Size([3]),
                stride=(1,),
            )
        )

    def _make_optimizers(self) -> None:
        held = [["e", "a"], ["e", "b"] if "shared" in self.words else ["b"]]
        if "turned" in self.words:
            held[0].reverse()
        for which, names in enumerate(held):
            if self.lacks(which):
                self.optimizers.append(None)
                continue
            parameters = [self.params[name] for name in names]
            fused = FUSED[which] in self.words and not self.exact
            made = torch.optim.SGD(
                parameters, lr=1.0, fused=fused, foreach=None if fused else False
            )
            self.optimizers.append(made)
        self.real = list(self.optimizers)
        for word, kind in STRANGE.items():
            if word in self.words and not (self.exact and kind is OwnKernel):
                self.optimizers[0] = kind(self.optimizers[0])
        self.inner = list(self.optimizers)
        if "wrapped" in self.words:
            self.optimizers[0] = Wrapper(self.optimizers[0])

    def _constructed(self) -> Any:
        scaler = self.construct(self)
        if not self.idle:
            scaler.scale(torch.ones(()))  # torch is ready only then
        return scaler

    # - Calls

    def allows(self, call: Call) -> bool:
        """Return True if the call has a right result now, for any scaler.

        A step or a clip without a backward since the last step has none, for example.
        """
        which = call.which
        # not onto gradients that unscale_ or a clip has divided
        if call.kind in (*BACKWARDS, "data"):
            adds_to_both = which == 2 or "shared" in self.words
            return not (self.looked & ({0, 1} if adds_to_both else {which}))
        if call.kind in SPOILS and which in self.looked:
            return False  # after the check its outcome is not specified
        if call.kind == "look":
            return which in self.looked
        if call.kind == "scalers-cross" and not self.ever_stepped:
            return False  # there was no order yet
        if call.kind in ("fail", "lone-clip", "two-scalers", "scalers-cross"):
            # of an iteration that has begun, a failure leaves nothing
            return which in self.fresh - self.looked - self.clipped - self.stepped
        if call.kind == "cross" and not self.fresh & self.ordered >= {0, 1}:
            return False  # there was no order yet
        if call.kind in STEPS and which not in self.fresh | self.stepped:
            return False
        if self.begun_anew:
            # new gradients may be stepped on, and what was divided is scaled again:
            # neither is torch's
            if call.kind in STEPS and which in self.stepped & self.renewed:
                return False
            if call.kind in STEPS and which in self.looked & self.replaced:
                return False
            after_division = ("unscale", "handclip", "look", "replace")
            if call.kind in after_division and which in self.looked:
                return False
        if call.kind == "replace":  # before a division they would have to be scaled
            return which in self.looked
        if call.kind == "elder":  # its update ends the rank's iteration
            return not self.stepped | self.looked | self.clipped
        if call.kind == "unscale":
            return which in self.fresh | self.stepped
        if call.kind in CLIPS:
            return which in self.fresh - self.clipped - self.stepped
        if "lacks" in self.words:  # a rank that lacks one cannot refuse for it
            if call.kind in STEPS:
                return which in self.fresh - self.stepped
            if call.kind == "update":
                return bool(self.stepped)
        if "idle" in self.words:  # a rank without optimizers cannot name one
            pending = self.clipped - self.stepped
            if call.kind in STEPS:
                return which not in self.stepped and (which in pending or not pending)
            if call.kind == "update":
                return bool(self.stepped) and not pending
        if call.kind in ("skipped", "scheduler"):
            return which in self.ever_stepped
        if call.kind == "user-scale":
            return FUSED[which] in self.words
        return True

    def make(self, call: Call) -> Any:
        """Make one call.

        Returns:
            The values to compare besides the state: a norm, an answer, gradients.
        """
        before = torch.get_default_dtype()
        if self.world is not None:
            torch.set_default_dtype(self._default_dtype())
        try:
            return self._make(call)
        finally:
            torch.set_default_dtype(before)

    def _default_dtype(self) -> torch.dtype:
        if "default-bf16" in self.words:
            return torch.bfloat16
        return torch.float64 if "default-fp64" in self.words else torch.float32

    def _make(self, call: Call) -> Any:
        kind = call.kind.replace("-", "_")
        if call.kind in CLIPS and call.kind != "clip-and-step":
            kind = "clip"
        if kind in BACKWARDS:
            self.fresh |= {0, 1} if call.which == 2 else {call.which}
            if call.which == 0 and "shared" in self.words:
                self.fresh |= {1}
            return None if self.idle else self._backward(call)
        result = getattr(self, f"_{kind}")(call)
        if kind in ("unscale", "clip"):
            self.looked |= {call.which}
        of_one = (*STEPS, "clip_and_step", "lone_clip", "two_scalers", "scalers_cross")
        if kind in (*of_one, "cross"):
            done = {call.which} if kind in of_one else {0, 1}
            self.fresh -= done
            self.looked -= done
            self.stepped |= done
            self.ever_stepped |= done
            self.ordered |= done
        elif kind in ("update", "set", "reload", "elder"):
            # divided, and never stepped with; what is shared is of both optimizers
            both = {0, 1} if self.looked and "shared" in self.words else self.looked
            self.fresh -= both
            self.clipped, self.stepped, self.renewed = set(), set(), set()
            self.replaced = set()
            self.begun_anew = False
            if kind in ("reload", "elder"):
                self.ordered = set()
            if kind != "reload":  # the old scaler may have left a division pending
                self.looked = set()
        return result

    def _backward(self, call: Call) -> None:
        held = [n for n in self._names(call.which) if n in self.params]
        if not held:
            return
        new = [p for name in held if (p := self.params[name]).grad is None]
        if call.kind == "seed":
            torch.autograd.backward(
                [self._loss(held)], [self.scaler.scale(torch.ones(()))]
            )
        elif call.kind == "cback" and self.world is not None:
            torch._dynamo.reset()
            torch.compile(self._scaled, backend="eager")(self._loss(held)).backward()
        elif call.kind == "autograd" and self.world is not None:
            from torch._dynamo import compiled_autograd

            with compiled_autograd._enable(torch.compile(backend="eager")):
                self.scaler.scale(self._loss(held)).backward()
        elif call.kind == "gback":
            loss = self._loss(held)
            for name in held:  # adds zero, but has a second derivative
                inner = local(self.params[name])
                loss = loss + (inner - inner.detach()).square().real.sum()
            self.scaler.scale(loss).backward(create_graph=True)
        else:
            self.scaler.scale(self._loss(held)).backward()
        if "buckets" in self.words:
            # one version for all: a write to one of them looks like one to any
            buffer = torch.cat([p.grad for p in new] or [torch.zeros(0)])
            for parameter, view in zip(new, buffer.split(3), strict=False):
                parameter.grad = view
        if "subclass" in self.words and self.world is not None:
            for name in held:
                self.params[name].grad = self.params[name].grad.as_subclass(Marked)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled

    def _names(self, which: int) -> str:
        second = "eb" if "shared" in self.words else "b"
        return {0: "ea", 1: second, 2: "eab"}[which]

    def _loss(self, names: list[str]) -> torch.Tensor:
        wide = self.exact or "fp64" in self.words
        loss = torch.zeros((), dtype=torch.float64 if wide else torch.float32)
        for name in names:
            value, slope = local(self.params[name]), self.slope(name)
            if "sparse" in self.words and name != "b":
                # the first row twice: its gradient comes in two values
                rows = torch.tensor([0, 0, 1, 2])
                weights = torch.tensor([[slope / 2], [slope / 2], [slope], [slope]])
                found = nn.functional.embedding(rows, value, sparse=True)
                loss = loss + (found * weights.to(value.dtype)).sum()
            elif value.is_complex():
                loss = loss + (value * complex(slope, -slope)).real.sum()
            else:
                loss = loss + (value * slope).sum()
        return loss

    def _zero(self, call: Call) -> None:
        self.fresh -= {call.which}
        self.looked -= {call.which}
        self.renewed |= {call.which} if call.kind != "clear" else set()
        if not self.lacks(call.which):
            to_none = call.kind != "clear"
            self.optimizers[call.which].zero_grad(set_to_none=to_none)

    _clear = _zero

    def _inf(self, call: Call) -> None:
        """Write an infinity into the first element of a or b, on one rank."""
        if call.rank == self.rank:
            self._spoil("ab"[call.which], 0, math.inf)

    def _nan(self, call: Call) -> None:
        """Write a nan into the last element of e or b, on one rank."""
        if call.rank == self.rank:
            self._spoil("eb"[call.which], -1, math.nan)

    def _both(self, call: Call) -> None:
        """Write an infinity into the first element of a or b, on all ranks."""
        self._spoil("ab"[call.which], 0, math.inf)

    def _spoil(self, name: str, place: int, value: float) -> None:
        parameter = self.params.get(name)
        if parameter is not None and parameter.grad is not None:
            part = local(parameter.grad.detach())
            (part._values() if part.is_sparse else part)[place] = value

    def _none(self, call: Call) -> None:
        """Set an optimizer's gradients to None on one rank."""
        if call.rank == self.rank:
            for parameter in self.held(call.which):
                parameter.grad = None

    def _scale(self, call: Call) -> list[torch.Tensor]:
        """Scale a nested list of losses; return the products, divided by the scale."""
        loss = torch.tensor(3.0)
        one, (two,) = self.scaler.scale([loss, (loss,)])
        scale = 1.0 if self.exact else self.scaler.get_scale()
        return [torch.stack([one, two]) / scale]

    def _unscale(self, call: Call) -> Any:
        if self.lacks(call.which):  # the others' step brings their found_inf
            return []
        optimizer = self.inner[call.which]  # of a wrapped one, that inside
        is_inference = "inference" in self.words and self.world is not None
        with torch.inference_mode(is_inference):
            self.scaler.unscale_(optimizer)
        return self.gradients(call.which)

    def _look(self, call: Call) -> Any:
        return self.gradients(call.which)

    def _data(self, call: Call) -> None:
        self.fresh |= {call.which}
        for name in self._names(call.which):
            if (gradient := self.params[name].grad) is not None:
                slope = torch.tensor(self.slope(name), dtype=gradient.dtype)
                gradient.data.copy_(self.scaler.scale(slope).expand_as(gradient))

    def gradients(self, which: int) -> list[Any]:
        """Return an optimizer's gradients: dense, local, in double precision."""
        grads = [p.grad for p in self.held(which)]
        return [_wide(local(g.detach())) for g in grads if g is not None]

    def held(self, which: int) -> list[Any]:
        """Return the parameters of an optimizer; none on an idle rank."""
        if self.lacks(which):
            return []
        return list(self.optimizers[which].param_groups[0]["params"])

    def _handclip(self, call: Call) -> None:
        torch.nn.utils.clip_grad_norm_(self.held(call.which), 0.125)

    def _replace(self, call: Call) -> None:
        self.replaced.add(call.which)
        for parameter in self.held(call.which):
            if parameter.grad is not None:
                self.kept.append(parameter.grad)
                parameter.grad = torch.full_like(parameter, self.slope("b"))

    def _clip(self, call: Call) -> float:
        side = self.inner if call.kind == "clip-inner" else self.optimizers
        optimizer = None if self.idle else side[call.which]
        self.clipped.add(call.which)
        return float(self.scaler.clip_grad_norm_(optimizer, *CLIPS[call.kind]))

    def _clip_and_step(self, call: Call) -> float:
        optimizer = None if self.lacks(call.which) else self.optimizers[call.which]
        return float(self.scaler.clip_and_step(optimizer, *CLIPS[call.kind]))

    def _user_scale(self, call: Call) -> None:
        # an attribute of the fused optimizer, which the scaler takes into account; one
        # tensor each time
        self.optimizers[call.which].grad_scale = self.own_scale

    def _step(self, call: Call) -> list[Any]:
        if not self.lacks(call.which):
            self.scaler.step(self.optimizers[call.which])
        elif self.world is not None:
            self.scaler.step(None)
        return self.gradients(call.which)  # as a log may want them

    def _retry(self, call: Call) -> list[Any]:
        if self.idle:
            return self._step(call)
        interrupts = [_Interrupted()]

        def hook(*_: Any) -> None:
            if interrupts:
                raise interrupts.pop()

        handle = self.real[call.which].register_step_pre_hook(hook)
        try:
            return self._step(call)
        except _Interrupted:
            self.begun_anew = True
            return self._step(call)
        finally:
            handle.remove()

    def _fail(self, call: Call) -> bool:
        """Make a call that fails; return True if it raised on this rank."""
        self.failed = self.begun_anew = True
        raised = True  # in the oracle it is as if the batch had not been
        if self.world is not None:
            params = self.real[call.which].param_groups[0]["params"]
            params += [None] * (self.rank == call.rank)  # no parameter
            try:
                self.scaler.step(self.optimizers[call.which])
                raised = False
            except Exception:  # any kind: which one is for the scaler's own tests
                pass
            finally:
                params[:] = [each for each in params if each is not None]
        self._zero(call)
        return raised

    def _lone_clip(self, call: Call) -> None:
        if self.world is not None and self.rank == call.rank:
            self.scaler.clip_grad_norm_(self.optimizers[call.which], 2.0**600)
        self.scaler.step(self.optimizers[call.which])

    def _two_scalers(self, call: Call) -> None:
        if self.world is None:
            self.scaler.step(self.optimizers[0])
            return
        self.other.grad = self.second.scale(torch.ones(1))
        both = [(self.scaler, self.optimizers[0]), (self.second, self.other_optimizer)]
        is_turned = call.kind == "scalers-cross" and self.rank == call.rank
        for scaler, optimizer in both[:: -1 if is_turned else 1]:
            scaler.step(optimizer)
        self.second.update()

    _scalers_cross = _two_scalers

    def _closure(self, call: Call) -> None:
        self.scaler.step(self.optimizers[call.which], closure=lambda: 1.0)

    def _cross(self, call: Call) -> None:
        turned = self.world is not None and self.rank == call.rank
        for optimizer in self.optimizers[:: -1 if turned else 1]:
            self.scaler.step(optimizer)

    def _skipped(self, call: Call) -> bool:
        return bool(self.scaler.step_was_skipped(self.optimizers[call.which]))

    def _scheduler(self, call: Call) -> bool:
        scheduler = torch.optim.lr_scheduler.ConstantLR(self.real[call.which], 1.0)
        scheduler.optimizer = self.optimizers[call.which]
        return bool(self.scaler.step_scheduler(scheduler))

    def _update(self, call: Call) -> float:
        """End the iteration; then sum the ranks, which shows extra collectives."""
        # whether there is anything to end after a failure alone is nobody's promise
        excused = Exception if self.world is None else AssertionError
        with suppress(excused) if self.failed else nullcontext():
            self.scaler.update()
        self.failed = False
        if self.world is None or self.size == 1:
            return float(sum(range(self.size)))
        ranks = torch.tensor([float(self.rank)])
        dist.all_reduce(ranks)
        return float(ranks)

    def _set(self, call: Call) -> None:
        self.scaler.update(2.0**call.which)
        self.failed = False

    def _reload(self, call: Call) -> None:
        state = self.scaler.state_dict()
        self.scaler = self._constructed()
        self.scaler.load_state_dict(state)

    def _load(self, call: Call) -> None:
        """Give an optimizer new groups, while its wrapper keeps the old ones."""
        if not self.lacks(call.which):
            optimizer = self.real[call.which]
            optimizer.load_state_dict(optimizer.state_dict())

    def _regroup(self, call: Call) -> None:
        if self.world is not None:
            self._leave()
            self._join()

    def _elder(self, call: Call) -> None:
        state = self.scaler.state_dict()
        if self.world is not None:
            self._leave()
            if self.rank == call.rank:
                # one that needs a process group cannot train alone
                with suppress(Exception):
                    self._train_alone()
            self._join()
        self.scaler.load_state_dict(state)

    def _train_alone(self) -> None:
        alone = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([alone], lr=1.0)
        self.scaler.scale(alone.sum()).backward()
        self.scaler.step(optimizer)
        self.scaler.update()

    def _leave(self) -> None:
        assert self.world is not None
        self.groups = getattr(self, "groups", 0) + 1
        # no rank may close a connection that another still waits on
        self.world.store.set(f"leave/{self.groups}/{self.rank}", "here")
        self.world.store.wait(
            [f"leave/{self.groups}/{rank}" for rank in range(self.size)], PATIENCE
        )
        dist.destroy_process_group()

    def _join(self) -> None:
        assert self.world is not None
        # the store still has the keys of the groups before
        store = dist.distributed_c10d.PrefixStore(
            f"group/{self.groups}", self.world.store
        )
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.size
        )

    # - Observed values

    def state(self) -> dict[str, Any]:
        """Return the values to compare after each call, by name."""
        state: dict[str, Any] = {
            name: _wide(local(p.detach())) for name, p in self.params.items()
        }
        tracker = growth_tracker(self.scaler.state_dict())
        if tracker is not None:
            state["the growth tracker"] = tracker
        return state | {"the scale": float(self.scaler.get_scale())}

    def is_bad(self, which: int) -> bool:
        """Return True if a gradient of this optimizer is not finite."""
        grads = (local(g) for p in self.held(which) if (g := p.grad) is not None)
        return any(
            not bool((g._values() if g.is_sparse else g).isfinite().all())
            for g in grads
        )

    def has_gradients(self, which: int) -> bool:
        """Return True if this optimizer has any gradient."""
        return any(p.grad is not None for p in self.held(which))

    def counted(self, which: int) -> list[torch.Tensor]:
        """Return gradients that belong to the global norm, each element once."""
        names = {id(p): name for name, p in self.params.items()}
        return [
            _wide(local(p.grad.detach()))
            for p in self.held(which)
            if p.grad is not None and self.counts(names.get(id(p), "a"))
        ]


def norm_of(gradients: list[torch.Tensor], order: float) -> float:
    """Return the norm of all elements, by plain arithmetic that does not overflow."""
    parts = [abs(each) for g in gradients for each in g.flatten().tolist()]
    largest = max(parts, default=0.0)
    if not math.isfinite(largest) or largest == 0.0:
        return math.nan if any(map(math.isnan, parts)) else largest
    total: float = math.fsum((p / largest) ** order for p in parts) ** (1 / order)
    return largest * total


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense copy in double precision."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    kind = torch.complex128 if dense.is_complex() else torch.float64
    return dense.to(kind, copy=True).flatten().as_subclass(torch.Tensor)
