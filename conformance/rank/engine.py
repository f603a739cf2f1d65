"""Training loop of a rank, on the model that ``layout`` has built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_
from torch.optim.lr_scheduler import ExponentialLR

from ...fixtures import (
    Batch,
    CannotError,
    Counts,
    WorkloadError,
    defers_gradient_sync,
    local,
    without_gradient_sync,
)
from ..formulas import clip_factor
from ..space.facts import clip_value_of, facts_of
from ..space.recipes import CLIP_NORM, LR_DECAY
from ..space.recomputation import Recomputed
from ..space.scenario import Scenario
from .buffers import buffers_as_they_are
from .layout_checks import check_share
from .local_parts import (
    LocalPart,
    parameters_of,
    read_local_parts,
)
from .observe import dtype_name, local_part
from .routing import Choices
from .torch_internals import set_loss_function
from .variation import Reduction, Variation

if TYPE_CHECKING:  # a slow import
    from torch.distributed.pipelining import ScheduleGPipe

__all__ = ["MICRO_BATCHES", "Engine"]

Prepare = Callable[[list[Tensor], int, int], list[Tensor]]
MICRO_BATCHES = 2
"""Number of micro-batches of a pipeline schedule."""
_NO_SYNC = (
    "the module has neither a no_sync() as DDP's nor a part under fully_shard: its "
    "gradients are synchronised in every backward"
)


@dataclass(kw_only=True)
class Engine:
    """A model laid out on this rank, with its optimizers and training loop."""

    scenario: Scenario
    module: Any
    """Module to call: the model, its wrapper, or a pipeline stage's part. If the
    workload has a ``train_step``: any object that ``train_step`` accepts."""
    mesh: DeviceMesh
    parameters: dict[str, nn.Parameter]
    """Name in the full model -> parameter on this rank."""
    whole: dict[str, Tensor]
    """Name -> full parameter with its initial values."""
    initial: str
    """Digest of the initial weights."""
    dropouts: dict[str, float]
    """Name of a dropout in the model before ``parallelize`` -> its probability."""
    buffers: dict[str, Tensor]
    """Name -> initial value of each buffer that is compared."""
    saved_names: frozenset[str]
    """Names of the buffers in the ``state_dict`` of the full model."""
    module_names: Set[str]
    """Names of the full model's modules."""
    trained: frozenset[str]
    """Names of parameters that require a gradient in the full model."""
    index: dict[str, NDArray[np.int64]]
    """Name -> position of each local element in the flat full tensor."""
    optimizers: list[torch.optim.Optimizer]
    """Optimizers of gradparity's loop, or those that a ``train_step`` was observed to
    use."""
    owned: list[list[str]]
    """For each optimizer of gradparity's loop: names of its parameters."""
    device: torch.device
    schedule: ScheduleGPipe | None = None
    """Pipeline schedule; None if the topology is not a pipeline."""
    replicas: dict[str, int] = field(default_factory=dict)
    """Name -> number of ranks that hold the same elements; needed for norms."""
    choices: Sequence[Mapping[str, Choices]] = ()
    """For each step: choices that learned routers must make. If empty, routers make
    their own."""
    recomputed: Recomputed | None = None
    """Counter of recomputed forwards, if the recipe recomputes."""
    counts: Counts = ()
    """Total counts of the last step, if the loss is (sum, count)."""
    loss_dtype: str = ""
    """Name in torch of the last loss's dtype."""
    variation: Variation | None = None
    """Difference of this run from the plain one, if it is a reference on one rank."""
    reduction: Reduction | None = None
    """Random rounding in place of the promised reduction, for a reference on one
    rank."""
    _inferred: bool = False

    def __post_init__(self) -> None:
        decayed = self.optimizers if self.scenario.parsed_recipe.training.decay else []
        for group in [
            group for optimizer in decayed for group in optimizer.param_groups
        ]:
            if not isinstance(group.get("lr"), int | float | Tensor):
                text = f"the optimizer has the learning rate {group.get('lr')}"
                raise CannotError(f"{text}, which a scheduler cannot change")
        self.schedulers = [ExponentialLR(optimizer, LR_DECAY) for optimizer in decayed]

    def take_optimizers(self, made: list[torch.optim.Optimizer]) -> None:
        """Replace the optimizers; new schedulers load the state of the old ones."""
        self.optimizers, old = made, self.schedulers
        if old:
            self.schedulers = [ExponentialLR(each, LR_DECAY) for each in made]
        for new, saved in zip(self.schedulers, old, strict=True):
            new.load_state_dict(saved.state_dict())

    def forward_backward(self, batch: Batch, prepare: Prepare) -> float | None:
        """Run forward and backward of one step on this rank's share of ``batch``.

        Args:
            batch: the global batch.
            prepare: (losses of a micro-batch, its index, number of micro-batches) ->
                losses on which backward is called, for example the scaled ones.

        Returns:
            The unscaled loss over this rank's rows. Its mean over the ranks is the loss
            of the batch. None on ranks without a loss: all pipeline stages except the
            last.
        """
        if self.schedule is not None:
            return self._pipeline_pass(self.share(batch), prepare)
        defers = self.scenario.parsed_recipe.defer_sync
        if defers and not defers_gradient_sync(self.module):
            raise CannotError(_NO_SYNC)
        parts = self.micro_batches(batch)
        # the first backward already divides by the total, so count all parts before it
        self.counts = self._counted(parts) if len(parts) > 1 else ()
        losses = []
        for number, part in enumerate(parts):
            deferred = defers and number + 1 < len(parts)
            with without_gradient_sync(self.module) if deferred else nullcontext():
                # data parallel training divides by its ranks afterwards; this factor
                # cancels that
                weight = self._ranks_of_data * part.elements / batch.elements
                where = (number, len(parts))
                losses.append(self._pass(part, prepare, where, weight))
        return sum(losses)

    def share(self, batch: Batch) -> Batch:
        """Return the part of a global batch that this rank trains on."""
        workload = self.scenario.workload
        if workload.shard is None or self.is_single:
            with workload.calling("batch"):
                return batch.shard(*self._data_coordinate())
        share = workload.shard(batch, self.mesh)
        # counts have a check of their own, since they do not include padding
        if not facts_of(workload.name).counted:
            groups = [self.mesh.get_group(axis) for axis in self._data_axes]
            check_share(workload, batch, share, groups)
        return share

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """Return the micro-batches of one step on this rank.

        Raises:
            CannotError: if there are too few rows for the recipe.
        """
        if self.variation is not None:
            return self.variation.micro_batches(self.share(batch), self.scenario)
        share, workload = self.share(batch), self.scenario.workload
        if workload.micro_batches is not None:
            return workload.micro_batches(share)
        if self.scenario.parts == 1:
            return [share]
        with workload.calling("shard"):
            return share.cut(self.scenario.sizes(share.rows))

    def check_recomputed(self) -> None:
        """Check that a part of the model was recomputed on some rank.

        Raises:
            CannotError: if no part was recomputed.
        """
        if self.recomputed is None:
            return
        # over all ranks: one may hold no such part, and all must raise together
        again = torch.tensor(float(self.recomputed.again), device=self.device)
        dist.all_reduce(again)
        if not again:
            text = "no part of the model ran again in backward: the layout compiles its"
            raise CannotError(f"{text} modules, hides them, or calls none of them")

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's local part of each parameter, by name."""
        if not self.gives_weights:
            return {n: local_part(p) for n, p in self.parameters.items()}
        now = self._given_weights()
        others = sorted(now.keys() ^ self.index.keys())
        if others:
            when = "no longer gives" if others[0] in self.index else "gives now"
            text = (
                f"{when} {others[0]}: it must give the names that it gave right after"
            )
            raise self.scenario.workload.refuse("weights", f"{text} parallelize")
        return {name: local_part(now[name].tensor) for name in self.index}

    @property
    def is_single(self) -> bool:
        """True if the model is not parallelized."""
        return not self.scenario.parsed_topology.parallel

    @property
    def gives_weights(self) -> bool:
        """True if ``weights`` says which piece of a parameter a rank holds."""
        return self.scenario.workload.weights is not None and not self.is_single

    def total_counts(self, counts: Counts) -> Counts:
        """Return the sums of counts over ranks with different rows.

        Raises:
            WorkloadError: if a sum is 0, because the loss is divided by it.
        """
        # fp64 holds any count of tokens exactly
        total = torch.tensor(counts, dtype=torch.float64, device=self.device)
        # one axis after the other, so together over all ranks with different rows
        for axis in self._data_axes:
            dist.all_reduce(total, group=self.mesh.get_group(axis))
        if not (total > 0).all():
            text = "the counts of a step add up to 0 over all ranks and micro-batches"
            raise self.scenario.workload.refuse("loss", text)
        return tuple(total.tolist())

    def weight_of(self, parts: Iterable[Batch]) -> float | None:
        """Return the weight of these micro-batches in the loss of the whole batch.

        If the loss is (sum, count), a call of the loss gives the count. The call needs
        a model output of the right form; its values do not matter. So a new whole model
        runs on this rank.

        Returns None if the weight is unknown: that model rejects the rank's inputs, the
        loss rejects its output, or the loss has several counts.
        """
        workload = self.scenario.workload
        if not facts_of(workload.name).counted:
            return float(sum(part.elements for part in parts))
        if facts_of(workload.name).counts > 1:
            return None
        count = 0.0
        with torch.random.fork_rng(devices=[]):
            model = workload.model().to(self.device)
            for part in parts:
                try:
                    with workload.calling("forward"):
                        output = model(part.inputs)
                    count += sum(workload.objective(output, part.targets)[1])
                # the model may accept only inputs that the layout has prepared, and its
                # output may have other rows than the targets of this rank
                except WorkloadError:
                    return None
        return count

    def _counted(self, parts: Iterable[Batch]) -> Counts:
        """Return the counts of a whole step, which the first backward needs.

        Empty if the loss is a mean. A step of one micro-batch needs no call. The extra
        forward passes leave no state behind.
        """
        workload = self.scenario.workload
        if not facts_of(workload.name).counted:
            return ()
        counts = []
        needed = facts_of(workload.name).differentiates
        with (
            torch.set_grad_enabled(needed),
            torch.random.fork_rng(devices=[]),
            buffers_as_they_are(self.module),
        ):
            for part in parts:
                counts.append(self._objective(part)[1])
        return self.total_counts(tuple(map(sum, zip(*counts, strict=True))))

    def find_parameters(self) -> None:
        """Look up the parameters again, because a load may have replaced them."""
        parameters: dict[str, Any]
        if self.gives_weights:
            parameters = {n: part.tensor for n, part in self._given_weights().items()}
        else:
            parameters = {**parameters_of(self.module, self.whole)}
        if parameters.keys() != self.parameters.keys():
            text = f"left {len(parameters)} parameters of {len(self.parameters)}"
            raise self.scenario.workload.refuse("load_checkpoint", text)
        self.parameters = {name: parameters[name] for name in self.parameters}

    def _given_weights(self) -> dict[str, LocalPart]:
        """Return the current result of the workload's ``weights``."""
        workload = self.scenario.workload
        assert workload.weights is not None
        weights = workload.weights(self.module)
        return read_local_parts(workload, "weights", weights, self.whole)

    def clip(self) -> None:
        """Clip the unscaled gradients as the recipe says."""
        clip = self.scenario.parsed_recipe.training.clip
        if clip == "value":
            limit = clip_value_of(self.scenario.workload)
            # one by one: torch's foreach form refuses plain tensors beside DTensors
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    # the limit is for the whole gradient, and not for a partial sum
                    parameter.grad = _gradient_as_its_parameter(parameter)
                    clip_grad_value_(parameter, limit, foreach=False)
        elif clip == "norm":
            self._clip_norm()

    def _clip_norm(self) -> None:
        """Clip by the exact global norm; an element on several ranks counts once."""
        # in fp64, where the order of ranks hardly matters
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        # each rank counts its elements; an empty shard has none
        clipped = [
            (name, parameter)
            for name in self.replicas
            if (parameter := self.parameters[name]).grad is not None
        ]
        for name, parameter in clipped:
            gradient = local(_gradient_as_its_parameter(parameter))
            # each of n replicas adds 1/n of its squares
            squares += gradient.double().square().sum() / self.replicas[name]
        dist.all_reduce(squares)
        factor = clip_factor(math.sqrt(float(squares)), CLIP_NORM)
        for _, parameter in clipped:
            assert parameter.grad is not None
            local(parameter.grad).mul_(factor)

    def _losses(self, first: Tensor, output: Any) -> list[Tensor]:
        training = self.scenario.parsed_recipe.training
        losses = training.losses_of(first, output)
        return [x * self.scenario.loss_factor for x in losses]

    def _objective(self, part: Batch) -> tuple[list[Tensor], Counts]:
        """Return the losses of a micro-batch, and the counts that divide them.

        A count may be a number of tokens. Without counts the losses are means.
        """
        workload = self.scenario.workload
        with self.scenario.parsed_precision.autocast(self.device.type):
            with workload.calling("forward"):
                output = self.module(part.inputs)
            values, counts = workload.objective(output, part.targets)
            self.loss_dtype = dtype_name(values[0].dtype)
            if counts:
                return [x * self.scenario.loss_factor for x in values], counts
            return self._losses(values[0], output), counts

    def _pass(
        self, part: Batch, prepare: Prepare, where: tuple[int, int], weight: float
    ) -> float:
        """Run forward and backward of one micro-batch; return its weighted loss.

        ``where`` is (index, number of micro-batches). ``weight`` is the weight of the
        micro-batch in the mean loss of the batch.
        """
        losses, counts = self._objective(part)
        weights = [weight] * len(losses)
        if counts:
            self.counts = self.counts or self.total_counts(counts)
            weights = [self._ranks_of_data / total for total in self.counts]
        weighted = [x * w for x, w in zip(losses, weights, strict=True)]
        if counts:  # losses with counts, of one head or several
            weighted = [sum(weighted[1:], weighted[0])]
        starts = prepare(weighted, *where)
        with self.scenario.workload.calling("backward"):
            torch.autograd.backward(starts)
        return sum(x.item() * w for x, w in zip(losses, weights, strict=True))

    def _pipeline_pass(self, share: Batch, prepare: Prepare) -> float | None:
        assert self.schedule is not None
        losses: list[Tensor] = []
        # the first call also infers shapes, with a loss of empty memory
        extra = 0 if self._inferred else 1

        def prepared_loss(output: Tensor, targets: Tensor) -> Tensor:
            (first,), _ = self.scenario.workload.objective(output, targets)
            losses.extend(self._losses(first, output))
            part = len(losses) - 1 - extra
            return prepare(losses[-1:], part, MICRO_BATCHES)[0]

        # The schedule keeps the loss function it was made with. This closure replaces
        # it, since the scaler changes in each step.
        set_loss_function(self.schedule, prepared_loss)
        stage, stages = self.mesh.get_local_rank("pp"), self.mesh["pp"].size()
        with self.scenario.parsed_precision.autocast(self.device.type):
            if stage == 0:
                self.schedule.step(share.inputs)
            elif stage == stages - 1:
                self.schedule.step(target=share.targets)
            else:
                self.schedule.step()
        self._inferred = True
        real = [x.item() for x in losses[-MICRO_BATCHES:]]
        return sum(real) / len(real) if real else None

    @property
    def _data_axes(self) -> list[str]:
        """Mesh axes along which ranks have different rows."""
        axes = self.mesh.mesh_dim_names or ()
        return [a for a in axes if a in self.scenario.parsed_topology.data_axes]

    @property
    def _ranks_of_data(self) -> int:
        """Number of ranks over which data parallel training averages."""
        return self._data_coordinate()[1]

    def _data_coordinate(self) -> tuple[int, int]:
        """Return (index, count) of this rank among ranks with different rows."""
        index, count = 0, 1
        axes = [*(self.mesh.mesh_dim_names or ())]
        for axis in self._data_axes:
            # self.mesh[axis] would make a mesh, which is slow
            size = self.mesh.size(axes.index(axis))
            index = index * size + self.mesh.get_local_rank(axis)
            count *= size
        return index, count

    def trains(self, name: str) -> bool:
        """Return True if a parameter has local elements and requires a gradient."""
        return len(self.index[name]) > 0 and name in self.trained

    @property
    def rows(self) -> str:
        """Text that identifies this rank's rows; equal on ranks with the same rows."""
        return f"rows {self._data_coordinate()[0]}"


def _gradient_as_its_parameter(parameter: nn.Parameter) -> Tensor:
    """Return the gradient in the layout of its parameter."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    if not isinstance(parameter, DTensor):
        return gradient.full_tensor()
    if gradient.placements == parameter.placements:
        return gradient  # the tensor itself, since a scaler may recognise it
    return gradient.redistribute(placements=parameter.placements)
