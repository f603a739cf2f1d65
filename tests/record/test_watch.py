"""``gradparity.watch``: ranks that must be equal are compared while a job runs."""

import copy
import logging
import pickle
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    distribute_tensor,
)

import gradparity
from gradparity.conformance.rank.torch_internals import TorchDispatchMode
from gradparity.conformance.record import kept
from gradparity.conformance.record.topics import (
    Clipped,
    Numbers,
    Weights,
)
from gradparity.multiprocess import Cluster, WorldError, current_world
from gradparity.tests.record.megatron_stage import Stage

PERIOD, STEPS = 4, 9
FAULTS = {
    "": (),
    "quiet": (),  # two ranks call no model as one: their rows are not seen
    # the largest and the least are named: rank 1, and one that differs from it
    "drift": ("norm.weight has other bits on rank ", "on rank 1"),
    "rate": (" have different settings for ", " has lr 0.01"),
    "rows": ("rank 0 and rank 1 train on different rows",),
    "same": (" train on the same rows",),
    "skips": ("rank 3",),
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = OrderedDict[str, nn.Module](
        words=nn.Embedding(16, 8),
        up=nn.Linear(8, 8),
        norm=nn.LayerNorm(8),
        head=nn.Linear(8, 16),
    )
    return nn.Sequential(layers)


def job(fault: str, shards: bool, watched: bool = True) -> tuple[list[str], Tensor]:
    """Train on two ranks with half of the rows each; return messages and weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "copy"))
    rank = current_world().rank
    model = model_of()
    if shards:
        fully_shard(model, mesh=mesh)  # HSDP: data replicates, copy shards
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said: list[str] = []
    watch = None
    if watched:
        watch = gradparity.watch(
            model,
            optimizer,
            mesh=mesh,
            data=("data",),
            period=PERIOD,
            act=said.append,
        )
    for step in range(STEPS):
        seed = 2 * step + mesh.get_local_rank("data") * (fault != "same")
        seed += 1000 * (fault == "rows" and rank == 1)
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(16, (4, 6), generator=generator)
        optimizer.zero_grad()
        quiet = fault == "quiet" and rank > 1
        scores = model.forward(words) if quiet else model(words)
        scores.logsumexp(-1).mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            if not shards:
                dist.all_reduce(parameter.grad)
        if fault == "rate" and rank == 1:
            optimizer.param_groups[0]["lr"] = 1.01e-2
        if fault == "skips" and rank == 3 and step == 2:
            continue
        optimizer.step()
        if fault == "drift" and rank == 1 and step == 3:
            with torch.no_grad():
                weight = model.get_parameter("norm.weight")
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                local.view(torch.int32)[0] += 1
    if watch is not None:
        watch.close()
    parts = (getattr(p, "to_local", lambda p=p: p)() for p in model.parameters())
    return said, torch.cat([p.detach().flatten() for p in parts])


@pytest.mark.parametrize("fault", FAULTS)
def test_differences_of_ranks_that_must_be_equal_are_reported(
    four: Cluster, fault: str
) -> None:
    told = [said for said, _ in four.run(job, fault, False)]
    assert all(bool(said) == bool(FAULTS[fault]) for said in told), told
    for said in told:
        for words in FAULTS[fault]:
            assert any(words in text for text in said), said
    if fault == "skips":
        assert "ranks have taken other numbers of steps" in told[0][-1]
    if fault == "drift":  # within a period of the step that moved it
        steps = [int(text.split("step ")[1].split(":")[0]) for text in told[0]]
        assert 3 < min(steps) <= 3 + PERIOD + 1


def test_replicas_of_shards_are_watched(four: Cluster) -> None:
    told = [said for said, _ in four.run(job, "", True)]
    assert told == [[]] * 4
    told = [said for said, _ in four.run(job, "drift", True)]
    assert "norm.weight has other bits on rank 3 than on rank 1" in told[0][0]
    assert "If these are different tensors, name them in apart=" in told[0][0]


def test_training_is_the_same_bit_for_bit(four: Cluster) -> None:
    for shards in (False, True):
        watched = [after for _, after in four.run(job, "", shards)]
        alone = [after for _, after in four.run(job, "", shards, False)]
        assert all(map(torch.equal, watched, alone))


def starts_apart(apart: Sequence[str]) -> int:
    torch.manual_seed(current_world().rank)
    model = nn.ModuleDict({"experts": nn.Linear(2, 2), "gate": nn.Linear(2, 2)})
    with torch.no_grad():
        for parameter in model["gate"].parameters():
            parameter.fill_(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradparity.watch(model, optimizer, apart=apart) as watch:
        (weights,) = (each for each in watch.topics if isinstance(each, Weights))
        return sum(map(len, weights.turns))


def is_saved_and_copied() -> tuple[bool, bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradparity.watch(model, optimizer, mesh=mesh, data=("dp",)):
        copied = copy.deepcopy(model)
        text = pickle.dumps(model)
    loaded = pickle.loads(text)
    rows = torch.ones(1, 2)
    outputs = [each(rows) for each in (model, copied, loaded)]
    return all(
        torch.equal(outputs[0], o) for o in outputs
    ), b"gradparity.conformance" in text


def test_a_model_that_is_watched_can_be_saved_and_copied(two: Cluster) -> None:
    assert two.run(is_saved_and_copied) == [(True, False)] * 2


def test_other_tensors_of_one_name_are_asked_for(four: Cluster) -> None:
    with pytest.raises(WorldError, match=r"name them in apart=") as caught:
        four.run(starts_apart, ())
    assert isinstance(caught.value.root.exception, gradparity.RanksDifferError)
    assert four.run(starts_apart, ("experts.",)) == [2] * 4


def of_stages(drifts: bool) -> list[str]:
    """Train two pipeline stages of two ranks each; each stage numbers layers from 0."""
    rank = current_world().rank
    model = Stage(tp=2, pp=2, rank=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[str] = []
    with gradparity.watch(model, optimizer, period=1, act=told.append):
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            if drifts and rank == 3 and step == 0:
                norm = model.get_parameter("layers.0.norm")
                norm.data[0] = torch.nextafter(norm.data[0], torch.tensor(2.0))
            optimizer.step()
    return told


def test_megatrons_layout_says_which_ranks_hold_the_same(four: Cluster) -> None:
    assert four.run(of_stages, False) == [[]] * 4
    told = four.run(of_stages, True)
    assert all("layers.1.norm has other bits" in text for text in told[3])
    assert told[3]


def test_a_weight_that_never_moves_is_logged_once(
    four: Cluster,
) -> None:
    assert four.run(stands_still) == [["gate.weight"], [], [], []]


def of_shards(fault: str) -> tuple[list[str], list[str]]:
    """Train with fully sharded weights on four ranks; return messages and logs."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    rank = current_world().rank
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []
    scale = 512.0 if fault == "scale" and rank == 2 else 1024.0
    torch.manual_seed(0 if fault == "draws" else rank)
    watch = gradparity.watch(
        model,
        optimizer,
        mesh=mesh,
        data=("dp",),
        period=2,
        act=said.append,
        equal={"scale": lambda: scale, "norm": lambda: torch.tensor(3.0)},
    )
    with logged() as texts, watch:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 8), 4.0 * step + rank)).square().mean().backward()
            if fault == "rate" and rank == 1:
                optimizer.param_groups[0]["lr"] = 0.11
            if fault == "still" and rank == 3:
                optimizer.param_groups.clear()
            optimizer.step()
    return said, texts


@pytest.mark.parametrize(
    ("fault", "said", "log"),
    [
        ("", "", ""),
        ("rate", "ranks 0, 1 have different settings for 0.bias (rank ", ""),
        ("scale", "scale differs between ranks ", ""),
        (
            "draws",
            "",
            "watch: step 0: rank 0 and rank 1 draw the same numbers",
        ),
    ],
)
def test_ranks_without_replicas_are_watched(
    four: Cluster, fault: str, said: str, log: str
) -> None:
    for texts, logs in four.run(of_shards, fault):
        assert any(said in text for text in texts) if said else not texts, texts
        assert any(log in text for text in logs) if log else not logs, logs
        assert len(logs) <= 1


def test_a_part_that_stands_still_is_logged_where_it_is(four: Cluster) -> None:
    logs = [texts for _, texts in four.run(of_shards, "still")]
    assert logs[:3] == [[], [], []]
    assert "what rank 3 holds of it, did not move in 2 steps" in logs[3][0]


def clips(layout: str, fault: str, limit: float) -> list[str]:
    """Clip by a norm on four ranks, right or wrong by ``fault``; return messages."""
    model = model_of()
    if layout != "copies":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "copy"))
        fully_shard(
            model, mesh=mesh if layout == "hsdp" else init_device_mesh("cpu", (4,))
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norm, said = torch.zeros(()), list[str]()
    watching = gradparity.watch(
        model, optimizer, period=2, act=said.append, clipped=lambda: (norm, limit)
    )
    with watching:
        for step in range(4):
            optimizer.zero_grad()
            words = torch.arange(24).view(4, 6).add(step) % 16
            model(words).logsumexp(-1).square().mean().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
            of = parts if fault == "local" else gradients
            whole = torch.nn.utils.get_total_norm(of)
            norm = whole.full_tensor() if isinstance(whole, DTensor) else whole
            norm = norm * {"replicas": 2**0.5, "half": 0.5}.get(fault, 1.0)
            for part in parts:
                part.mul_((limit / (norm + 1e-6)).clamp(max=1))
            optimizer.step()
    return said


CLIPS = [
    (layout, fault, limit)
    for limit in (0.01, 1e3)
    for layout, faults in {
        "copies": ("",),
        "fsdp": ("", "local", "half"),
        "hsdp": ("", "replicas"),
    }.items()
    for fault in faults
]


def clips_all() -> list[list[str]]:
    return [clips(*case) for case in CLIPS]


def test_a_norm_that_is_not_of_all_shards_is_reported(four: Cluster) -> None:
    for told in four.run(clips_all):
        for (layout, fault, limit), said in zip(CLIPS, told, strict=True):
            if not fault:
                assert said == [], (layout, limit)
            else:
                assert len(said) == 2, (layout, fault, limit, said)  # steps 0 and 2
                assert (
                    "after clipping, the gradients of all shards have the norm "
                    in said[0]
                )


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the messages of gradparity.watch on this rank."""
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logger, handler = logging.getLogger("gradparity.watch"), Handler()
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def stands_still() -> list[str]:
    model = nn.ModuleDict({"up": nn.Linear(2, 2, bias=False)})
    model["gate"] = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logged() as texts, gradparity.watch(model, optimizer, period=2):
        for _ in range(6):
            model.get_parameter("up.weight").grad = torch.ones(2, 2)
            optimizer.step()
    return [text.split(": ")[2].split()[0] for text in texts]


class Masked(nn.Linear):
    """Linear layer for frames and a mask, which is the same in all batches."""

    def forward(self, frames: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = super().forward(frames)
        return scores if mask is None else scores * mask[..., None]


def trains(name: str) -> tuple[list[str], list[str]]:
    """Train on four ranks with different rows; return messages and logs."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    rank = current_world().rank
    torch.manual_seed(0)
    model: Any = nn.Sequential(OrderedDict(base=nn.Linear(4, 4), head=Masked(4, 4)))
    model.base.requires_grad_(name == "thaws")
    own = model if name.startswith("frozen") else model.head
    lr = torch.tensor(1e-2) if name == "tensor" else 1e-2 * (name != "paused")
    optimizer = torch.optim.AdamW(own.parameters(), lr=lr, betas=(0.9, 0.99))
    whole = model if name.startswith("frozen") else own
    if name == "handle":
        whole._handle = whole.register_forward_hook(lambda *_: None)
    said: list[str] = []
    equal: dict[str, Any] = {
        "zero": lambda: -0.0 if rank else 0.0,
        "nan": lambda: torch.tensor(-torch.nan if rank else torch.nan),
    }
    watching = gradparity.watch(
        whole,
        optimizer,
        mesh=mesh,
        data="dp",
        period=1,
        act=said.append,
        equal=equal if name == "numbers" else {},
    )
    compiled = torch.compile(whole, backend="eager") if name == "compiled" else whole
    with logged() as texts, watching:
        for step in range(9):
            rows = {"rows": 0, "apart": rank % 2}.get(name, rank)
            torch.manual_seed(100 * step + rows)
            mask = torch.ones(2, 3, dtype=torch.int64)
            frames, masks = torch.randn(2, 3, 4), (mask,) if name == "mask" else ()
            optimizer.zero_grad()
            compiled(frames, *masks).square().mean().backward()
            for parameter in own.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
            if name == "frozen drifts" and rank == 2 and step == 3:
                model.base.weight.view(torch.int32)[0] += 1
            if name == "joins" and step == 2:
                optimizer.add_param_group({"params": model.base.parameters()})
            optimizer.step()
    return said, texts


JOBS = {
    "mask": ("", ""),
    "numbers": ("", ""),
    "tensor": ("", ""),
    "handle": ("", ""),
    "paused": ("", ""),
    "frozen": ("", ""),
    "rows": ("rank 0 and rank 1 train on the same rows", ""),
    "apart": ("rank 0 and rank 2 train on the same rows", ""),
    "frozen drifts": ("base.weight has other bits on rank ", ""),
    "joins": ("", "2 parameters joined an optimizer after watch was called"),
    "compiled": ("", "step 3: rows are not compared"),
}
"""Job -> message and log."""


def train_all() -> list[tuple[list[str], list[str]]]:
    return [trains(name) for name in JOBS]


def test_right_jobs_are_silent_and_faults_have_their_names(four: Cluster) -> None:
    for rank, told in enumerate(four.run(train_all)):
        for (name, (said, log)), (texts, logs) in zip(JOBS.items(), told, strict=True):
            got = name, rank, texts, logs
            assert any(said in text for text in texts) if said else not texts, got
            if log and (rank == 0 or name == "joins"):
                assert len(logs) == 1 and log in logs[0], got
            else:
                draws = "draw the same numbers" if name in ("rows", "apart") else None
                assert not logs or (draws and draws in logs[0]), got


def goes_on() -> list[str]:
    """Give ranks different numbers in one step; the job catches the error and goes on.

    Return the caught errors.
    """
    model, rank = nn.Linear(2, 2), current_world().rank
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    caught, step = list[str](), 0
    watch = gradparity.watch(
        model,
        optimizer,
        equal={"step": lambda: step, "x": lambda: rank if step == 2 else 0},
    )
    for step in range(12):
        if rank == 1 and step == 2:  # the others read its message later than it does
            time.sleep(0.3)
        try:
            optimizer.step()
        except RuntimeError as error:
            caught.append(str(error))
    for _ in range(2):
        try:
            watch.close()
        except RuntimeError as error:
            caught.append(str(error))
    return caught


def test_a_job_that_catches_the_error_goes_on(four: Cluster) -> None:
    for caught in four.run(goes_on):
        assert len(caught) == 1 and "step 2: x differs" in caught[0], caught


def joins(extra: int) -> list[str]:
    """Train under ``join``, where each rank has more batches than the one before."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []
    with logged() as texts, gradparity.watch(model, optimizer, act=said.append):
        with model.join():
            for _ in range(1 + extra * current_world().rank):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    return said + texts


def test_ranks_that_join_later_are_not_waited_for(two: Cluster) -> None:
    for texts in two.run(joins, 40):
        assert len(texts) == 1 and "step 0: the watch ends: within join()" in texts[0]


def ends_early(raises: bool) -> str:
    """Rank 1 takes fewer steps than the other ranks, and may raise an error."""
    model, rank = model_of(), current_world().rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with gradparity.watch(model, optimizer) as watch:
            watch.patience = 0.3
            for _ in range(30 if rank != 1 else 2):
                optimizer.step()
            if raises:
                raise KeyError("of the job")
    except (KeyError, RuntimeError) as told:
        return str(told)
    return ""


def test_a_rank_that_ends_early_is_named_and_hides_no_error(four: Cluster) -> None:
    told = four.run(ends_early, False)
    assert told[1] == ""
    assert "rank 0 lacks a message of another rank for step 3 (none within " in told[0]
    assert four.run(ends_early, True)[1] == "'of the job'"


def sends_norms() -> tuple[bool, list[str]]:
    """Send whole and partial norms that are DTensors.

    Returns:
        True if a whole norm is sent as a plain tensor, and the errors of partial ones.
    """
    mesh = init_device_mesh("cpu", (2,))
    whole, part = (
        DTensor.from_local(torch.ones(()), mesh, [placement])
        for placement in (Replicate(), Partial())
    )
    number = Numbers({"norm": lambda: whole}).give(0)[0][0].value
    clipped = Clipped([], lambda: (part, 1.0), 1, None, torch.device("cpu"))
    refused = []
    for topic in (Numbers({"norm": lambda: part}), clipped):
        with pytest.raises(TypeError) as error:
            topic.give(0)
        refused.append(str(error.value))
    return type(number) is Tensor, refused


def clips_partial_gradients() -> list[str]:
    model = nn.Linear(2, 2, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(model.weight.detach(), mesh, [Replicate()])
    model.weight = nn.Parameter(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clipped: Any = lambda: (9.0, 1.0)  # noqa: E731  # nothing was clipped
    watching = gradparity.watch(model, optimizer, period=1, clipped=clipped)
    with logged() as texts, watching:
        for _ in range(2):
            ones = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])
            model.weight.grad = ones
            watching.stepped()
    return texts


def test_a_norm_of_partial_gradients_is_not_checked_without_a_word(
    two: Cluster,
) -> None:
    """Norms in sequence parallelism have such gradients."""
    first, second = two.run(clips_partial_gradients)
    (told,) = first or second
    assert "step 0: clipped= checks nothing: rank 0 has 1 gradient not summed" in told


def clips_sparse_gradients(right: bool) -> list[str]:
    """Step by the sparse gradient of an embedding, in which a row comes twice."""
    torch.manual_seed(0)
    words = nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SGD(words.parameters(), lr=0.1)
    said = list[str]()
    words(torch.tensor([1, 1, 3])).square().sum().backward()
    assert words.weight.grad is not None
    norm = words.weight.grad.to_dense().norm() * (1 if right else 2)
    with gradparity.watch(
        words, optimizer, period=1, act=said.append, clipped=lambda: (norm, 1e3)
    ):
        optimizer.step()
    return said


@pytest.mark.parametrize("right", [True, False])
def test_the_norm_of_sparse_gradients_is_checked(two: Cluster, right: bool) -> None:
    for said in two.run(clips_sparse_gradients, right):
        assert ["after clipping, the gradients" in each for each in said] == (
            [] if right else [True]
        )


def other_flags() -> list[str]:
    model, rank = model_of(), current_world().rank
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=rank == 1)
    said = list[str]()
    with gradparity.watch(model, optimizer, period=1, act=said.append):
        model(torch.arange(6).view(1, 6)).sum().backward()
        optimizer.step()
    return said


def test_a_flag_that_differs_is_shown(two: Cluster) -> None:
    first, second = (said[0] for said in two.run(other_flags))
    assert "amsgrad" not in first and "amsgrad True" in second


LEAVES = """
import torch, torch.distributed as dist, gradparity
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
with torch.no_grad():
    model.weight.fill_(0.5), model.bias.fill_(0.5)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
watch = gradparity.watch(model, optimizer)
watch.patience = 0.5
if dist.get_rank():
    dist.broadcast(torch.ones(1), 0)  # waits for rank 0
for step in range(40):
    optimizer.step()
"""


def test_a_process_ends_although_a_message_never_comes(tmp_path: Path) -> None:
    """Gloo waits for messages of a group that it destroys, for half an hour."""
    (tmp_path / "job.py").write_text(LEAVES)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*run, "--nproc-per-node", "2", str(tmp_path / "job.py")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "rank 0 lacks a message of another rank for step 0" in done.stderr


def test_a_watch_whose_optimizer_never_steps_says_so() -> None:
    """The job made its optimizer again."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logged() as texts, gradparity.watch(model, optimizer):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert len(texts) == 1 and "no step of the watched optimizer was seen" in texts[0]


def test_a_norm_of_fsdp2_is_sent_as_a_plain_tensor(two: Cluster) -> None:
    """A device cannot put a DTensor and plain tensors into one message."""
    for is_plain, refused in two.run(sends_norms):
        assert is_plain
        for what, text in zip(
            ("equal= has norm, which", "clipped="), refused, strict=True
        ):
            assert text.startswith(
                f"{what} returned a DTensor with placements (Partial"
            )
            assert text.endswith("holds a part: return its full_tensor()")


class Outer(torch.optim.Optimizer):
    """Wrapper without the state of its base, as torch's PostLocalSGDOptimizer."""


def test_one_process_can_watch_and_bad_use_raises() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradparity.watch(model, optimizer) as watch:
        optimizer.step()
    assert watch.step == 1
    with pytest.raises(ValueError, match="give the optimizers that train the model"):
        gradparity.watch(model)
    with pytest.raises(
        ValueError, match="data= has axes of a device mesh, and there is no mesh="
    ):
        gradparity.watch(model, optimizer, data=("dp",))
    with pytest.raises(ValueError, match="no trained parameter"):
        gradparity.watch(model, optimizer, apart=("",))
    with pytest.raises(ValueError, match="clipped= needs one optimizer"):
        gradparity.watch(model, optimizer, apart=("up",), clipped=lambda: (1.0, 1.0))
    with pytest.raises(ValueError, match="has 17 names: at most 16"):
        many = {str(n): lambda: 0.0 for n in range(17)}
        gradparity.watch(model, optimizer, equal=many)
    wrong: Any = [optimizer]
    with pytest.raises(TypeError, match=r"optimizers of torch, and got a list: give"):
        gradparity.watch(model, wrong)
    outer: Any = Outer.__new__(Outer)
    with pytest.raises(TypeError, match=r"got a Outer: give each as an argument"):
        gradparity.watch(model, outer)
    outer._optimizer_step_pre_hooks = {}  # in place of torch's table of hooks
    with pytest.raises(TypeError, match=r"got a Outer: give each as an argument"):
        gradparity.watch(model, outer)
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module, and got a list"):
        gradparity.watch(wrong, optimizer)
    with pytest.raises(TypeError, match=r"scale needs a function, and got 1\.0: write"):
        gradparity.watch(model, optimizer, equal={"scale": cast("Any", 1.0)})
    with pytest.raises(ValueError, match=r"period= is a number of steps, and got 0"):
        gradparity.watch(model, optimizer, period=0)
    with pytest.raises(ValueError, match=r"weight is on the meta device"):
        gradparity.watch(nn.Linear(2, 2, device="meta"), optimizer)
    gradparity.watch(model, optimizer, equal={"x": lambda: cast("Any", None)})
    with pytest.raises(TypeError, match=r"equal= has x, whose function returned None"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.gpu
def test_nobody_waits_for_a_watch_of_a_gpu() -> None:
    model = nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, norm = torch.ones(8, 64, device="cuda"), torch.zeros((), device="cuda")
    said: list[str] = []
    watching = gradparity.watch(
        model,
        optimizer,
        period=1,
        act=said.append,
        equal={"norm": lambda: norm, "scale": lambda: 2.0},
        clipped=lambda: (norm, 1.0),
    )
    with watching:
        for step in range(6):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = norm * (0.5 if step == 3 else 1.0)
            torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert len(said) <= 1 and all("step 3: the gradients of" in text for text in said)


class _Sizes(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that a function makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not func.is_view:
            self.largest = max(self.largest, made.numel())
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_a_large_weight_needs_little_memory(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    weight = torch.randn(50, 41).to(dtype)
    whole = kept.digest_of(weight)
    monkeypatch.setattr(kept, "CHUNKS", {"cpu": 100})
    with _Sizes() as sizes:
        assert kept.digest_of(weight) == whole
    assert 0 < sizes.largest <= 100
    for at in (0, 99, 100, 2049):
        other = weight.clone()
        other.view(-1)[at] += 1
        assert kept.digest_of(other) != whole


def test_a_message_is_below_1_kb_for_a_large_model() -> None:
    model = nn.ParameterDict(
        {f"p{n}": nn.Parameter(torch.ones(1)) for n in range(5000)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    many = {str(n): lambda: 0.0 for n in range(16)}
    watch = gradparity.watch(model, optimizer, equal=many)
    (weights,) = (each for each in watch.topics if isinstance(each, Weights))
    assert sum(map(len, weights.turns)) == 5000
    for _ in weights.turns:
        watch._send()
        assert watch._sent[-1].landing.read()[1].nbytes <= 1024
        watch.step += 1
    watch.close()


def steps_apart(fault: str) -> list[str]:
    """Train copies whose rank 1 has another rate, or skips a step; return messages."""
    rank = current_world().rank
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # values that are no numbers, as optimizers of others have
    optimizer.param_groups[0] |= {"names": ["a", "b"], "betas": (0.9, 0.99)}
    optimizer.param_groups[0]["many"] = torch.zeros(2)
    said, step = list[str](), 0
    watching = gradparity.watch(
        model, optimizer, period=1, act=said.append, equal={"step": lambda: step}
    )
    if fault == "rate" and rank == 1:
        optimizer.param_groups[0]["lr"] = 0.2
    with watching:
        for step in range(4):  # read by equal=
            if fault == "skip" and rank == 1 and step == 1:
                continue
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5 + step)
            optimizer.step()
    return said


def test_a_cause_is_reported_before_its_consequence(two: Cluster) -> None:
    first, second = two.run(steps_apart, "rate")
    text = "gradparity.watch: step 0: ranks 0, 1 have different settings for head.bias"
    assert first[0].startswith(f"{text} (rank 0 has lr 0.1, ")
    assert second[0].startswith(f"{text} (rank 1 has lr 0.2, ")
    assert "betas (0.9, 0.99)" in first[0]
    assert "names" not in first[0] and "many" not in first[0]
    assert any("has other bits" in each for each in first)
    first, _ = two.run(steps_apart, "skip")
    text = "step 1: step differs between ranks 0, 1 (it is 1 on rank 0)"
    assert first[0] == f"gradparity.watch: {text}"
    assert any("has other bits" in each for each in first[1:])


def equalises(fault: str) -> list[str]:
    """Train copies that are made equal after each step; return messages."""
    rank, said = current_world().rank, list[str]()
    model = model_of()
    parameters = [*model.parameters()]
    own = parameters[rank::2] if fault == "zero" else parameters
    optimizer = torch.optim.SGD(own, lr=0.1 + 0.1 * rank * (fault == "zero"))
    with gradparity.watch(model, optimizer, period=1, act=said.append):
        for step in range(4):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1.0 + rank)
            optimizer.step()
            for number, parameter in enumerate(parameters):
                if fault == "zero":
                    dist.broadcast(parameter.data, number % 2)
                elif fault == "once" and step == 1:
                    continue
                else:
                    dist.all_reduce(parameter.data, dist.ReduceOp.AVG)
    return said


@pytest.mark.parametrize("fault", ["", "zero", "once"])
def test_weights_that_are_made_equal_after_a_step(two: Cluster, fault: str) -> None:
    """Also by hand-written ZeRO, where each rank's optimizer has its own weights."""
    first, second = two.run(equalises, fault)
    if fault != "once":
        assert first == second == []
    else:
        assert first and all("step 2: " in each for each in first)
        assert all("has other bits" in each for each in first)


def diverges_at_the_end(average: str) -> list[str]:
    """Train two parts by two optimizers; return messages."""
    rank, said = current_world().rank, list[str]()
    model = model_of()
    parameters = [*model.parameters()]
    halves = [torch.optim.SGD(parameters[n::2], lr=0.1) for n in range(2)]
    with gradparity.watch(model, *halves, period=1, act=said.append):
        for step in range(4):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1.0 + rank)
            for each in halves:
                each.step()
            for parameter in parameters if average == "always" or step < 3 else ():
                dist.all_reduce(parameter.data, dist.ReduceOp.AVG)
    return said


@pytest.mark.parametrize("average", ["always", "until the last step"])
def test_weights_are_compared_once_more_at_the_end(two: Cluster, average: str) -> None:
    """Two optimizers step before the job averages: the first one reads."""
    first, second = two.run(diverges_at_the_end, average)
    if average == "always":
        assert first == second == []
    else:
        assert first and all("step 4: " in each for each in first)


@pytest.mark.parametrize("period", [1, 4])
def test_a_rate_that_leaves_0_is_no_weight_that_stands_still(
    caplog: pytest.LogCaptureFixture, period: int
) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradparity.watch(model, optimizer, period=period):
        for step in range(12):
            optimizer.param_groups[0]["lr"] = 0.1 * (step >= 6)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert "did not move" not in caplog.text
