"""Workloads with the layouts of the findings in docs/wild.

    gradparity run --scaler none --workload \
      gradparity.benchmarks.validation.wild_workloads:Lasso

Each is the layout that a finding is about, and nothing else. Outputs stay DTensors up
to the loss or the penalty, which converts them to plain tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor import distribute_tensor as distribute
from torch.distributed.tensor import parallel as tp
from torch.nn import functional as F

Pair = tuple[Any, Any]


class Rows:
    """Regression on a tensor-parallel mesh axis."""

    meshes: tuple[dict[str, int], ...] = ({"tp": 2},)

    def model(self) -> nn.Module:
        """Return two layers."""
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))

    def batch(self, step: int, seed: int) -> Pair:
        """Return random features, and a target that depends on them."""
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(12, 8, generator=generator)
        return x, x.abs()[:, :4]

    def loss(self, output: Any, targets: Any) -> Any:
        """Return the mean squared error."""
        return F.mse_loss(output, targets)

    def optimizer(self, parameters: list[tuple[str, nn.Parameter]]) -> Any:
        """Return SGD: a wrong factor of a gradient shows in the update."""
        return torch.optim.SGD([p for _, p in parameters], lr=0.1)


class MseLoss(Rows):
    """Tensor-parallel workload whose output stays split by columns in the loss."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Split layers by columns and by rows; the last output is a DTensor."""
        axis = mesh["tp"]
        last = tp.ColwiseParallel(use_local_output=False)
        tp.parallelize_module(
            model,
            axis,
            {"0": tp.ColwiseParallel(output_layouts=Replicate()), "2": last},
        )
        return model

    def loss(self, output: Any, targets: Any) -> Any:
        """Return the mean squared error; a DTensor gets a DTensor as its target."""
        if isinstance(output, Tensor) and hasattr(output, "device_mesh"):
            targets = distribute(targets, output.device_mesh, [Shard(1)])
            found: Any = F.mse_loss(output, targets)
            return found.full_tensor()
        return F.mse_loss(output, targets)


class Lasso(Rows):
    """Group lasso on a weight whose rows are split."""

    penalty = staticmethod(lambda w: torch.linalg.vector_norm(w, dim=0).sum().square())

    def model(self) -> nn.Module:
        """Return the model, with the penalty added to each output."""
        return Penalised(self.penalty)

    def parallelize(self, model: Any, mesh: DeviceMesh) -> nn.Module:
        """Split the rows of the first weight over the ranks."""
        tp.parallelize_module(
            model, mesh["tp"], {"up": tp.ColwiseParallel(output_layouts=Replicate())}
        )
        return model  # type: ignore[no-any-return]


class Amax(Lasso):
    """Penalty on the largest element of a weight whose rows are split."""

    penalty = staticmethod(lambda w: w.square().amax())


class Penalised(nn.Module):
    """Module that adds a penalty on its first weight to each output."""

    def __init__(self, penalty: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 4)
        self.penalty = penalty

    def forward(self, x: Tensor) -> Tensor:
        """Return the output features, with the penalty."""
        extra = self.penalty(self.up.weight)
        if hasattr(extra, "full_tensor"):
            extra = extra.full_tensor()
        found: Tensor = self.down(self.up(x).tanh()) + 0.01 * extra
        return found


class Frequency(Rows):
    """Embedding that scales by frequency; the batch is a DTensor split by rows."""

    def model(self) -> nn.Module:
        """Return an embedding table and a head."""
        table = nn.Embedding(5, 6, scale_grad_by_freq=True)
        return nn.Sequential(table, nn.Linear(6, 4))

    def batch(self, step: int, seed: int) -> Pair:
        """Return tokens and features."""
        generator = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(5, (12, 4), generator=generator)
        return tokens, torch.randn(12, 4, 4, generator=generator)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Replicate the parameters; the module splits the rows."""
        axis = mesh["tp"]

        def split(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return distribute(inputs[0], mesh, [Shard(0)])

        def whole(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.full_tensor()

        return distribute_module(model, axis, None, split, whole)


# - Packages, imported where they are used: none of them is needed for another


class Tokens(Rows):
    """Next-token training; the layout returns the loss, one process returns logits."""

    def model(self) -> nn.Module:
        """Return an embedding, a router and a head."""
        return Tiled()

    def batch(self, step: int, seed: int) -> Pair:
        """Return rows of tokens."""
        generator = torch.Generator().manual_seed(1000 * seed + step)
        rows = torch.randint(12, (4, 8), generator=generator)
        return rows, rows.roll(-1, 1)

    def loss(self, output: Any, targets: Any) -> Any:
        """Return the cross entropy, plus the router's z-loss if the output has one."""
        if output[0].ndim == 0:
            return output[0] + output[1]
        logits, extra = output
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + extra

    def parallelize(self, model: Any, mesh: DeviceMesh) -> nn.Module:
        """Return the model as it is: replicas with the same rows need no reduction."""
        model.how = type(self).__name__
        return model  # type: ignore[no-any-return]


class TiledHead(Tokens):
    """Uses DeepSpeed's TiledFusedLogitsLoss as the loss."""


class TiledInPlace(Tokens):
    """Uses DeepSpeed's sequence_tiled_compute as the loss."""


class Tiled(nn.Module):
    """Model that returns logits or a tiled loss, and a z-loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.router = nn.Embedding(12, 8), nn.Linear(8, 4, bias=False)
        self.head, self.how = nn.Linear(8, 12, bias=False), ""

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits or the loss of tokens, and the z-loss."""
        x, y = self.body(rows), rows.roll(-1, 1)
        extra = self.router(x).logsumexp(-1).square().mean()
        if not self.how:
            return self.head(x), extra
        from deepspeed.runtime.sequence_parallel import ulysses_sp as tiles

        def loss(_: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x).flatten(0, -2), y.flatten())

        weights = [self.head.weight]
        if self.how == "TiledHead":
            apply = tiles.TiledFusedLogitsLoss.apply
            return apply(loss, self, x, y, None, 4, weights, "mean"), extra
        found = tiles.sequence_tiled_compute(
            lambda x, y: loss(None, x, y),
            8,
            4,
            {"x": x, "y": y},
            {},
            "x",
            weights,
            output_unshard_dimension=0,
        )
        return found, extra


class Mixer(Rows):
    """DeepSpeed's AutoTP on a model that mixes tokens through a transpose."""

    def model(self) -> nn.Module:
        """Return a projection, a layer that mixes tokens, and a head."""
        return Mixing()

    def batch(self, step: int, seed: int) -> Pair:
        """Return one matrix and one target for each row of the batch."""
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(4, 6, 8, generator=generator)
        return x, x.abs()[:, :4, :4].sum(1)

    def parallelize(self, model: Any, mesh: DeviceMesh) -> nn.Module:
        """Replace two layers of torch by those of AutoTP."""
        import deepspeed
        from deepspeed.module_inject import layers

        # an operation that DeepSpeed would compile at the first start
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        layers.set_autotp_mode(training=True)
        group = mesh.get_group("tp")
        model.mix = layers.LinearLayer(model.mix, group)
        model.head = layers.LinearAllreduce(model.head, group)
        return model  # type: ignore[no-any-return]

    def weights(self, stack: Any) -> dict[str, Any]:
        """Return name -> this rank's part of each parameter."""
        rank = torch.distributed.get_rank()
        parts = {
            "mix.weight": (slice(3 * rank, 3 * rank + 3), slice(None)),
            "head.weight": (slice(None), slice(3 * rank, 3 * rank + 3)),
        }
        return {
            n: (p, parts[n]) if n in parts else p for n, p in stack.named_parameters()
        }


class Mixing(nn.Module):
    """Mixes the tokens of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(8, 8, bias=False)
        self.mix, self.head = (
            nn.Linear(6, 6, bias=False),
            nn.Linear(6, 4, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, 4) for (rows, tokens, features)."""
        rows = [self.head(self.mix(self.below(m).tanh().t())).mean(0) for m in x]
        return torch.stack(rows)


class Transposed(Rows):
    """Megatron-Core's entry to a tensor-parallel region, followed by a transpose."""

    def model(self) -> nn.Module:
        """Return a projection and a head."""
        return Headed()

    def batch(self, step: int, seed: int) -> Pair:
        """Return (rows, tokens, features), and a class for each token."""
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(4, 6, 8, generator=generator)
        return x, torch.randint(12, (4, 6), generator=generator)

    def loss(self, output: Any, targets: Any) -> Any:
        """Return the mean over rows."""
        return output.mean() + 0.0 * targets.sum()

    def parallelize(self, model: Any, mesh: DeviceMesh) -> nn.Module:
        """Keep this rank's columns of the head."""
        model.group, rank = mesh.get_group("tp"), mesh.get_local_rank("tp")
        part = model.head.weight.detach().chunk(2)[rank].clone()
        model.head.weight = nn.Parameter(part)
        return model  # type: ignore[no-any-return]

    def weights(self, stack: Any) -> dict[str, Any]:
        """Return name -> this rank's part of each parameter."""
        rank = torch.distributed.get_rank()
        part = slice(6 * rank, 6 * rank + 6), slice(None)
        below, head = stack.below.weight, stack.head.weight
        return {"below.weight": below, "head.weight": (head, part)}


class Headed(nn.Module):
    """Model with one output for each row, summed over all columns of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.head = (
            nn.Linear(8, 8, bias=False),
            nn.Linear(8, 12, bias=False),
        )
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Return a number for each row of (rows, tokens, features)."""
        hidden = self.below(x.transpose(0, 1)).tanh()  # (tokens, rows, features)
        if self.group is None:
            whole: Tensor = self.head(hidden.transpose(0, 1)).square().sum((1, 2))
            return whole
        from megatron.core.tensor_parallel import mappings

        enter = mappings.copy_to_tensor_model_parallel_region
        leave = mappings.reduce_from_tensor_model_parallel_region
        hidden = enter(hidden, self.group).transpose(0, 1)
        found: Tensor = leave(self.head(hidden).square().sum((1, 2)), self.group)
        return found


class Smoothing(Transposed):
    """Megatron-Core's loss with label smoothing; one process has torch's formula."""

    def loss(self, output: Any, targets: Any) -> Any:
        """Return the cross entropy with a tenth of the target on all other classes."""
        if output.shape[-1] == 12:
            target = torch.full_like(output, 0.1 / 11)
            target = target.scatter(-1, targets.unsqueeze(-1), 0.9)
            return -(target * output.log_softmax(-1)).sum(-1).mean()
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        return vocab_parallel_cross_entropy(output.clone(), targets, 0.1).mean()

    def model(self) -> nn.Module:
        """Return the model, but with scores of tokens as its output."""
        return Scores()

    def parallelize(self, model: Any, mesh: DeviceMesh) -> nn.Module:
        """Set up Megatron-Core's global groups, then lay out the model."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(2)
        return super().parallelize(model, mesh)


class Scores(Headed):
    """Module that returns scores for each token, for this rank's columns."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, tokens, classes) for (rows, tokens, features)."""
        hidden = self.below(x).tanh()
        if self.group is not None:
            from megatron.core.tensor_parallel import mappings

            hidden = mappings.copy_to_tensor_model_parallel_region(hidden, self.group)
        found: Tensor = self.head(hidden)
        return found
