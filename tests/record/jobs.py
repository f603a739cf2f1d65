"""Training jobs that know nothing of gradparity: ``python jobs.py JOB [FAULT]``.

Tests run each job as a process or as ranks of torchrun. A job imports only what it
needs, because imports take longer than the training.
"""

import contextlib
import hashlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

WIDTH, WORDS, LENGTH, ROWS, STEPS = 32, 64, 8, 8, 3


class Block(nn.Module):
    """Two norms and two feed-forward layers, the second with uneven sizes."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 66), nn.Linear(66, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm_1(x)).tanh()
        found: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))
        return found


class Model(nn.Module):
    """Language model: maps words to scores of words."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.words: nn.Embedding | None = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(2))
        self.head: nn.Linear | None = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) if self.words is not None else words
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x) if self.head is not None else x
        return scores

    def cut(self, stage: int) -> None:
        """Keep one of two stages, under the names of the whole model."""
        if stage == 0:
            self.head = None
            self.blocks[1] = nn.Identity()
        else:
            self.words = None
            self.blocks[0] = nn.Identity()


class OwnOptimizer:
    """Optimizer with its own step, outside of torch's class."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": parameters, "lr": 0.1}]

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def laid_out(job: str, model: nn.Module, world: int) -> tuple[nn.Module, int, int]:
    """Return the laid-out model, the number of data ranks, and this rank's index."""
    rank = dist.get_rank() if world > 1 else 0
    blocks = [each for each in model.modules() if isinstance(each, Block)]
    if job == "ddp":
        return nn.parallel.DistributedDataParallel(model), world, rank
    if job in ("fsdp1", "fsdp1-flat"):
        from torch.distributed.fsdp import FullyShardedDataParallel

        made = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=job == "fsdp1"
        )
        return made, world, rank
    if job in ("fsdp", "tp", "fsdp-tp", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import parallel as tp

        parts = {"fsdp": 1, "tp": world, "fsdp-tp": 2, "hsdp": 2}[job]
        mesh = init_device_mesh(
            "cpu", (world // parts, parts), mesh_dim_names=("a", "b")
        )
        if job == "hsdp":
            fully_shard(model, mesh=mesh)
            return model, world, rank
        if parts > 1:
            for block in blocks:
                plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
                tp.parallelize_module(block, mesh["b"], plan)
        rows = world // parts
        if rows > 1:
            for block in blocks:
                fully_shard(block, mesh=mesh["a"])
            fully_shard(model, mesh=mesh["a"])
        return model, rows, mesh.get_local_rank("a")
    return model, 1, 0


def main(job: str, fault: str = "") -> None:
    """Train, and print the trained weights."""
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1 if fault == "seed" else 0)
    whole = Model(0.1 if fault == "drop" else 0.0)
    if fault == "forward":
        whole.blocks[1].register_forward_hook(lambda _, __, out: out * 1.01)
    if fault == "backward":  # the same numbers, and gradients half as large again
        whole.blocks[1].register_forward_pre_hook(
            lambda _, args: args[0] + 0.5 * (args[0] - args[0].detach())
        )
    model, ranks, rank = laid_out(job, whole, world)
    named = dict(model.named_parameters())
    # a job may have hooks of its own on every optimizer
    register_optimizer_step_post_hook(lambda *_: None)
    rate = 1.01e-3 if fault == "rate" else 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    if job == "own":
        import gradparity

        own = OwnOptimizer([*model.parameters()])
        with gradparity.record(model, own):
            train(model, own, named, ranks, rank, fault)
    else:
        train(model, optimizer, named, ranks, rank, fault)
    digest = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        local = getattr(parameter, "to_local", lambda p=parameter: p)()
        digest.update(local.detach().numpy().tobytes())
    # in one piece: ranks share the output
    os.write(1, f"trained {rank} {digest.hexdigest()}\n".encode())
    if world > 1:
        end()


def train(
    model: nn.Module,
    optimizer: "torch.optim.Optimizer | OwnOptimizer",
    named: dict[str, nn.Parameter],
    ranks: int,
    rank: int,
    fault: str,
) -> None:
    """Train steps 0 to 2, with a fault.

    A continued job also trains steps 3 to 5; a resumed job trains only steps 3 to 5.
    """
    resumed = fault in ("resumed", "forgets")
    if resumed:
        state = torch.load(os.environ["CHECKPOINT"], weights_only=True)
        model.load_state_dict(state["model"])
        if fault != "forgets" and isinstance(optimizer, torch.optim.Optimizer):
            optimizer.load_state_dict(state["optimizer"])
    if fault == "prepares":
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        assert isinstance(optimizer, torch.optim.Optimizer)
        get_optimizer_state_dict(model, optimizer)  # steps once at rate 0
    steps = range(STEPS * 2) if fault == "continued" else range(STEPS)
    for step in range(STEPS, STEPS * 2) if resumed else steps:
        if fault == "continued" and step == STEPS:
            assert isinstance(optimizer, torch.optim.Optimizer)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, os.environ["CHECKPOINT"])
        generator = torch.Generator().manual_seed(step + 100 * (fault == "rows"))
        words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)
        words = words.chunk(ranks)[rank]
        optimizer.zero_grad()
        scores = model(words[:, :-1])
        half = LENGTH // 2 if fault == "loss" else LENGTH
        loss = loss_of(scores[:, :half], words[:, 1 : half + 1])
        (loss * (0.5 if fault == "half" else 1.0)).backward()
        for name, parameter in named.items():
            if fault == "one" and name.endswith("blocks.1.mix.weight"):
                assert parameter.grad is not None
                parameter.grad *= 1.5
            if fault == "shard" and name.endswith("blocks.1.up.weight"):
                last = dist.get_rank() == dist.get_world_size() - 1
                gradient = parameter.grad
                if last and gradient is not None:
                    getattr(gradient, "to_local", lambda g=gradient: g)().mul_(1.5)
            if fault == "zero" and name.endswith("blocks.1.mix.weight"):
                assert parameter.grad is not None
                parameter.grad.zero_()
        on_last = rank and rank == ranks - 1 and step == STEPS - 1
        if on_last and fault == "none":
            named["blocks.1.up.weight"].grad = None
        if fault == "dies" and step == 1:
            os._exit(7)
        if fault == "raises" and step == 1:
            with contextlib.suppress(ZeroDivisionError):
                optimizer.step(lambda: 1 // 0)  # type: ignore[call-arg]  # of torch
        optimizer.step()


def end() -> None:
    """Exit without cleanup: a thread of gloo may still use the last collective.

    The thread would abort the process when Python ends.
    """
    dist.destroy_process_group()
    os._exit(0)


def loss_of(scores: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), words.flatten())


def pipeline(fault: str) -> None:
    """Train a pipeline of two stages, with four micro-batches."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    model.cut(rank)
    if "names" in fault:  # each stage counts its blocks from 0
        model.blocks = nn.ModuleList([model.blocks[rank]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_of, scale_grads=fault != "scale")

    def place(name: str, parameter: nn.Parameter) -> tuple[str, Any, Any] | None:
        if rank == 0:
            return None
        name = name.replace("blocks.0", "blocks.1")
        return name, parameter.shape, (0,) * parameter.ndim

    declared: Any = contextlib.nullcontext()
    if fault == "names-declared":
        import gradparity

        declared = gradparity.record(model, optimizer, places=place)
    with declared:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(words[:, :-1])
            else:
                schedule.step(target=words[:, 1:])
            optimizer.step()
    end()


def megatron_fsdp(fault: str = "") -> None:
    """Megatron-FSDP's ZeRO 3; its placements do not show where shards are cut."""
    from gradparity.examples.stacks.without_cuda import without_cuda

    sys.modules["megatron"] = None  # type: ignore[assignment]  # see docs/stacks.md
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with without_cuda():
        from megatron_fsdp import fully_shard_model, fully_shard_optimizer
        from megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        units = {"device": torch.device("cpu"), "fsdp_unit_modules": [Block]}
        model = fully_shard_model(Model(), mesh, "dp", tp_dim="tp", **units)
        # It makes a step with gradients of 0, which would decay weights, and counts.
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
        optimizer = fully_shard_optimizer(adam)
        optimizer.param_groups[0]["weight_decay"] = 0.01
        for state in optimizer.state.values():
            state["step"].sub_(int(fault != "counted"))
        if fault != "hidden":
            for parameter in model.parameters():
                update_uneven_dtensor_chunk_metadata(parameter)
        train(model, optimizer, {}, 2, dist.get_rank(), fault)
    end()


if __name__ == "__main__":
    if sys.argv[1] == "pipeline":
        torch.set_num_threads(1)
        pipeline("".join(sys.argv[2:]))
    elif sys.argv[1] == "megatron-fsdp":
        torch.set_num_threads(1)
        megatron_fsdp(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
