"""Engine: builds the model of a scenario on this rank and runs its passes.

The one trick: before a topology lays the model out, every parameter is filled with
its own element numbers. What each rank then holds *is* the map from local elements to
the full tensor, whatever placements the topology chose; the true initial values are
written through that map. No knowledge of sharding internals is needed, and replicas
are recognised by holding the same map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from ..fixtures import MODELS, OPTIMIZERS, Batch, local, loss, order_parameters
from .scenario import Scenario

__all__ = ["Engine", "build_engine", "initial_model"]

Scale = Callable[[Tensor], Tensor]
MICRO_BATCHES = 2


@dataclass(kw_only=True)
class Engine:
    """A model laid out on this rank, with its optimizer."""

    scenario: Scenario
    module: nn.Module
    """What to call: the model, its DDP wrapper, or a pipeline stage's part."""
    mesh: DeviceMesh
    parameters: dict[str, nn.Parameter]
    """Name in the full model -> parameter on this rank."""
    index: dict[str, NDArray[np.int64]]
    """Name -> place of each local element in the flat full tensor."""
    optimizer: torch.optim.Optimizer
    device: torch.device
    schedule: ScheduleGPipe | None = None
    """The pipeline schedule, where the topology is a pipeline."""

    def forward_backward(self, batch: Batch, scale: Scale) -> float | None:
        """Run the passes of one step on this rank's share of ``batch``.

        Args:
            batch: the global batch.
            scale: what multiplies the loss before backward.

        Returns:
            The mean unscaled loss over this rank's rows; None on ranks that have no
            loss (all but the last stage of a pipeline).
        """
        share = batch.shard(*self._data_coordinate())
        if self.schedule is not None:
            return self._pipeline_pass(share, scale)
        parts = 2 if self.scenario.recipe == "accumulate" else 1
        losses = [
            self._pass(share.shard(i, parts), lambda x: scale(x / parts))
            for i in range(parts)
        ]
        return sum(losses) / parts

    def clip(self) -> None:
        """Clip the unscaled gradients as the recipe says."""
        limit = self.scenario.clip_value
        if limit is not None:
            # parameter by parameter: torch's foreach form refuses mixed tensor types
            for parameter in self.parameters.values():
                torch.nn.utils.clip_grad_value_(parameter, limit, foreach=False)

    def _pass(self, share: Batch, scale: Scale) -> float:
        with self.scenario.parsed_precision.autocast(self.device.type):
            value = loss(self.module(share.inputs), share.targets)
        scale(value).backward()
        return value.item()

    def _pipeline_pass(self, share: Batch, scale: Scale) -> float | None:
        assert self.schedule is not None
        losses: list[Tensor] = []

        def scaled_loss(output: Tensor, targets: Tensor) -> Tensor:
            losses.append(loss(output, targets))
            return scale(losses[-1])

        # The schedule keeps its loss function; only this closure knows the scaler.
        self.schedule._loss_fn = scaled_loss
        stage, stages = self.mesh.get_local_rank("pp"), self.mesh["pp"].size()
        with self.scenario.parsed_precision.autocast(self.device.type):
            if stage == 0:
                self.schedule.step(share.inputs)
            elif stage == stages - 1:
                self.schedule.step(target=share.targets)
            else:
                self.schedule.step()
        # the first call also infers shapes, with a loss of empty memory: the last count
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


def initial_model(scenario: Scenario) -> nn.Module:
    """The full model with the scenario's initial weights, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(scenario.seed)
        return MODELS[scenario.data]()


def build_engine(scenario: Scenario, mesh: DeviceMesh, device: torch.device) -> Engine:
    """Lay the scenario's model out over ``mesh`` and make its optimizer."""
    model = initial_model(scenario).to(device)
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    _fill_with_element_numbers(model)
    policy = scenario.parsed_precision.policy()
    module = scenario.parsed_topology.apply(model, mesh, policy)  # type: ignore[arg-type]  # MODELS hold nothing else
    parameters = {
        name.removeprefix("module."): p for name, p in module.named_parameters()
    }
    index = {n: _read_element_numbers(p) for n, p in parameters.items()}
    for name, parameter in parameters.items():
        _write_values(parameter, values[name], index[name])
    ordered = order_parameters(scenario.order, parameters.items())
    engine = Engine(
        scenario=scenario,
        module=module,
        mesh=mesh,
        parameters=parameters,
        index=index,
        optimizer=OPTIMIZERS[scenario.optimizer]([p for _, p in ordered]),
        device=device,
    )
    if "pp" in (mesh.mesh_dim_names or ()):
        engine.schedule = _pipeline(engine)
    return engine


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


def _write_values(
    parameter: nn.Parameter, values: Tensor, index: NDArray[np.int64]
) -> None:
    part = local(parameter.detach())
    chosen = values.reshape(-1)[torch.from_numpy(index).to(values.device)]
    part.copy_(chosen.view(part.shape))


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
