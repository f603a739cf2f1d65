"""Engine: builds the model of a scenario on this rank and runs its passes.

The one trick: before a topology lays the model out, every parameter is filled with
its own element numbers. What each rank then holds *is* the map from local elements to
the full tensor, whatever placements the topology chose; the true initial values are
written through that map. No knowledge of sharding internals is needed, and replicas
are recognised by holding the same map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_
from torch.optim.lr_scheduler import ExponentialLR

from ..fixtures import (
    Batch,
    is_workload,
    kit_of,
    local,
    loss,
    order_parameters,
    split_names,
    without_gradient_sync,
)
from .recipes import CLIP_NORM, CLIP_VALUE, LR_DECAY, Training, is_frozen
from .scenario import Scenario
from .workload import check_layout, full_name, same_everywhere

__all__ = ["Engine", "build_engine", "initial_model", "shard_id", "write_values"]

Prepare = Callable[[list[Tensor], int, int], list[Tensor]]
MICRO_BATCHES = 2


@dataclass(kw_only=True)
class Engine:
    """A model laid out on this rank, with its optimizers."""

    scenario: Scenario
    module: nn.Module
    """What to call: the model, its wrapper, or a pipeline stage's part."""
    mesh: DeviceMesh
    parameters: dict[str, nn.Parameter]
    """Name in the full model -> parameter on this rank."""
    index: dict[str, NDArray[np.int64]]
    """Name -> place of each local element in the flat full tensor."""
    optimizers: list[torch.optim.Optimizer]
    owned: list[list[str]]
    """Per optimizer: names of its parameters."""
    device: torch.device
    schedule: ScheduleGPipe | None = None
    """The pipeline schedule, where the topology is a pipeline."""
    replicas: dict[str, int] = field(default_factory=dict)
    """Name -> number of ranks that hold the same elements, for norms."""
    _inferred: bool = False

    def __post_init__(self) -> None:
        self.schedulers = [
            ExponentialLR(optimizer, LR_DECAY)
            for optimizer in self.optimizers
            if self.scenario.parsed_recipe.training.decay
        ]

    def forward_backward(self, batch: Batch, prepare: Prepare) -> float | None:
        """Run the passes of one step on this rank's share of ``batch``.

        Args:
            batch: the global batch.
            prepare: (losses of a micro-batch, its index, how many there are) -> what
                backward starts from, for example the scaled losses.

        Returns:
            The mean unscaled loss over this rank's rows; None on ranks that have no
            loss (all but the last stage of a pipeline).
        """
        share = batch.shard(*self._data_coordinate())
        if self.schedule is not None:
            return self._pipeline_pass(share, prepare)
        recipe = self.scenario.parsed_recipe
        losses = []
        for part in range(recipe.parts):
            deferred = recipe.defer_sync and part + 1 < recipe.parts
            with without_gradient_sync(self.module) if deferred else nullcontext():
                rows = share.shard(part, recipe.parts)
                losses.append(self._pass(rows, prepare, part, recipe.parts))
        return sum(losses) / recipe.parts

    def remake_optimizers(self) -> None:
        """Go on with new optimizers that are loaded from the old ones' states."""
        old, self.optimizers = (
            self.optimizers,
            _make_optimizers(self.scenario, self.parameters),
        )
        for new, saved in zip(self.optimizers, old, strict=True):
            new.load_state_dict(saved.state_dict())

    def clip(self) -> None:
        """Clip the unscaled gradients as the recipe says."""
        clip = self.scenario.parsed_recipe.training.clip
        if clip == "value":
            # parameter by parameter: torch's foreach form refuses mixed tensor types
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    # a partial sum cannot be cut off: what counts is the whole
                    parameter.grad = _gradient_as_its_parameter(parameter)
                    clip_grad_value_(parameter, CLIP_VALUE, foreach=False)
        elif clip == "norm":
            self._clip_norm()

    def _clip_norm(self) -> None:
        """Clip by the exact global norm, each element counted once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        # a rank counts what it holds; where a shard is empty there is nothing to count
        clipped = [
            (name, parameter)
            for name in self.replicas
            if (parameter := self.parameters[name]).grad is not None
        ]
        for name, parameter in clipped:
            gradient = local(_gradient_as_its_parameter(parameter))
            squares += gradient.double().square().sum() / self.replicas[name]
        dist.all_reduce(squares)
        # as torch.nn.utils.clip_grad_norm_ computes the factor
        factor = (CLIP_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0).float()
        for _, parameter in clipped:
            assert parameter.grad is not None
            local(parameter.grad).mul_(factor)

    def _losses(self, output: Tensor, targets: Tensor) -> list[Tensor]:
        training = self.scenario.parsed_recipe.training
        found = training.losses_of(self.scenario.kit.loss, output, targets)
        return [x * self.scenario.magnitude for x in found]

    def _pass(self, share: Batch, prepare: Prepare, part: int, parts: int) -> float:
        kit = self.scenario.kit
        with self.scenario.parsed_precision.autocast(self.device.type):
            with kit.calling("forward"):
                output = self.module(share.inputs)
            losses = self._losses(output, share.targets)
        starts = prepare([x / parts for x in losses], part, parts)
        with kit.calling("backward"):
            torch.autograd.backward(starts)
        return sum(x.item() for x in losses)

    def _pipeline_pass(self, share: Batch, prepare: Prepare) -> float | None:
        assert self.schedule is not None
        losses: list[Tensor] = []
        # the first call also infers shapes, with a loss of empty memory
        extra = 0 if self._inferred else 1

        def prepared_loss(output: Tensor, targets: Tensor) -> Tensor:
            losses.extend(self._losses(output, targets))
            part = len(losses) - 1 - extra
            return prepare(losses[-1:], part, MICRO_BATCHES)[0]

        # The schedule keeps its loss function; only this closure knows the scaler.
        self.schedule._loss_fn = prepared_loss
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

    def _data_coordinate(self) -> tuple[int, int]:
        """(index, count) of this rank among the ranks that see different rows."""
        index, count = 0, 1
        for axis in self.mesh.mesh_dim_names or ():
            if axis in self.scenario.parsed_topology.data_axes:
                size = self.mesh[axis].size()
                index = index * size + self.mesh.get_local_rank(axis)
                count *= size
        return index, count

    def trains(self, name: str) -> bool:
        """Whether a parameter has local elements that training moves."""
        return len(self.index[name]) > 0 and self.parameters[name].requires_grad

    @property
    def rows(self) -> str:
        """Which rows this rank sees; equal on ranks that see the same ones."""
        return f"rows {self._data_coordinate()[0]}"


def initial_model(data: str, seed: int, training: Training) -> nn.Module:
    """The full model with its initial weights, the same on every rank.

    Args:
        data: a key of ``fixtures.MODELS``, or a user's own workload.
        seed: seed of the weights.
        training: tells which parameters train.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kit_of(data).model()
    if training.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_frozen(name, data))
    return model


def build_engine(scenario: Scenario, mesh: DeviceMesh, device: torch.device) -> Engine:
    """Lay the scenario's model out over ``mesh`` and make its optimizer."""
    kit, training = scenario.kit, scenario.parsed_recipe.training
    model = initial_model(scenario.data, scenario.seed, training).to(device)
    if is_workload(scenario.data):
        same_everywhere(kit, "model", dict(model.named_parameters()))
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    tied = _tied(model)
    _fill_with_element_numbers(model)
    policy = scenario.parsed_precision.policy()
    module = scenario.parsed_topology.apply(model, mesh, policy)  # type: ignore[arg-type]  # MODELS hold nothing else
    if is_workload(scenario.data):
        check_layout(kit, module, values, tied)
    parameters = {full_name(n, values): p for n, p in module.named_parameters()}
    index = {n: _read_element_numbers(p) for n, p in parameters.items()}
    for name, parameter in parameters.items():
        write_values(parameter, values[name], index[name])
    if scenario.parsed_recipe.compile:
        module.compile(backend="aot_eager")
    engine = Engine(
        scenario=scenario,
        module=module,
        mesh=mesh,
        parameters=parameters,
        index=index,
        optimizers=_make_optimizers(scenario, parameters),
        owned=_split(scenario, parameters),
        device=device,
    )
    if scenario.parsed_topology.pipelined:
        engine.schedule = _pipeline(engine)
    return engine


def _tied(model: nn.Module) -> dict[str, str]:
    """Second names of parameters -> their first ones."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    return {name: first[p] for name, p in names if name != first[p]}


def _make_optimizers(
    scenario: Scenario, parameters: dict[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    make = scenario.kit.optimizers[scenario.optimizer]
    return [
        make(order_parameters(scenario.order, [(n, parameters[n]) for n in names]))
        for names in _split(scenario, parameters)
    ]


def _split(scenario: Scenario, names: Iterable[str]) -> list[list[str]]:
    """Parameter names by optimizer."""
    if scenario.parsed_recipe.optimizers == 1:
        return [list(names)]
    return [*split_names(names)]


def shard_id(index: NDArray[np.int64]) -> str:
    """Digest of an index map; replicas have equal ones."""
    return hashlib.blake2b(index.tobytes(), digest_size=6).hexdigest()


def _fill_with_element_numbers(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            # fp32 holds integers exactly up to 2**24; these models are far smaller
            assert parameter.numel() < 2**24
            numbers = torch.arange(parameter.numel(), dtype=parameter.dtype)
            parameter.copy_(numbers.view_as(parameter))


def _read_element_numbers(parameter: nn.Parameter) -> NDArray[np.int64]:
    flat = local(parameter.detach()).reshape(-1)
    return flat.to(torch.int64).cpu().numpy()


def write_values(tensor: Tensor, values: Tensor, index: NDArray[np.int64]) -> None:
    """Write into the local part of ``tensor`` what it holds of the full ``values``.

    Args:
        tensor: plain or DTensor, any shape.
        values: the full tensor, in any shape.
        index: place of each local element in the flat full tensor.
    """
    part = local(tensor.detach())
    chosen = values.reshape(-1)[torch.from_numpy(index).to(values.device)]
    part.copy_(chosen.view(part.shape))


def _gradient_as_its_parameter(parameter: nn.Parameter) -> Tensor:
    """The gradient laid out as its parameter; plans may leave it otherwise."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    if not isinstance(parameter, DTensor):
        return gradient.full_tensor()
    if gradient.placements == parameter.placements:
        return gradient  # itself: a scaler may know it
    return gradient.redistribute(placements=parameter.placements)


def _pipeline(engine: Engine) -> ScheduleGPipe:
    mesh = engine.mesh
    stage = PipelineStage(
        engine.module,
        mesh.get_local_rank("pp"),
        mesh["pp"].size(),
        engine.device,
        group=mesh.get_group("pp"),
    )
    return ScheduleGPipe(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss)
