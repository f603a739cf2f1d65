"""Devices: choice, refusals and messages; tests with the mark ``gpu`` need one."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gradparity.conformance.__main__ import main
from gradparity.conformance.rank import devices
from gradparity.conformance.rank import worker as rank_module
from gradparity.conformance.rank.devices import (
    SHARES,
    Devices,
    narrows_products,
    nccl_version,
    set_deterministic,
    visible_gpus,
)
from gradparity.conformance.report.records import Report, read_report
from gradparity.conformance.run import launcher as place_module
from gradparity.conformance.run.launcher import Place, Pool, Torchrun
from gradparity.conformance.run.recorder import make_header, replay_command
from gradparity.conformance.space.scenario import Scenario
from gradparity.fixtures import DATASETS, MODELS, OPTIMIZERS, Batch, loss
from gradparity.multiprocess import Cluster, WorldSpec
from gradparity.multiprocess.elastic.membership import Member
from gradparity.multiprocess.rank import worker
from gradparity.tests.made_up import evidence, finding, row

OURS = "gradparity.scaler:GradScaler"
QUICK = ("run", "--quick", "--scaler", OURS)
CUDA = Devices(device="cuda")
SHARED = Devices(device="cuda", share=True)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has two GPUs."""
    monkeypatch.setattr(place_module, "visible_gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "nccl_version", lambda: (2, 29))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_the_backend_follows_the_device() -> None:
    assert (Devices().backend, CUDA.backend, SHARED.backend) == ("gloo", "nccl", "nccl")
    spec = SHARED.spec(4, 9.0)
    assert (spec.world_size, spec.device, spec.share_devices) == (4, "cuda", True)
    assert (spec.backend, spec.timeout_s) == ("nccl", 9.0)


REFUSED: dict[str, tuple[list[str], str]] = {
    "sharing without GPUs": (["--share-gpus"], "goes with --device cuda only"),
    "an unknown device": (["--device", "tpu"], "unknown device"),
    "more ranks than GPUs": (
        ["--device", "cuda", "--topology", "hsdp"],
        "4 ranks and 2 GPUs, and NCCL takes one rank a GPU: choose another --topology "
        "or --world-size, or let ranks share with --share-gpus",
    ),
    "an NCCL that lets no ranks share": (
        ["--device", "cuda", "--share-gpus", "--topology", "hsdp"],
        "4 ranks and 2 GPUs, and NCCL 2.29 lets no ranks share one, 2.31 and later do",
    ),
}


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", REFUSED)
def test_options_that_cannot_work_are_refused_before_any_rank_starts(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options, words = REFUSED[name]
    try:
        code: object = main(["run", *options])
    except SystemExit as error:
        code = error.code
    told = capsys.readouterr().err
    assert code == 2
    assert words in told and told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_missing_gpu_is_reported_with_its_cause(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place_module, "visible_gpus", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["--device", "cuda", "--scaler", OURS]
    assert main(["replay", "single/1/fp32/sgd/none", *arguments]) == 2
    told = capsys.readouterr().err
    assert "no CUDA device is visible (CUDA_VISIBLE_DEVICES='')" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("two_gpus")
def test_sharing_and_few_ranks_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    Pool(SHARED, 9.0).check([1, 2])
    monkeypatch.setattr(devices, "nccl_version", lambda: (2, 31))
    Pool(SHARED, 9.0).check([1, 8])
    Pool(CUDA, 9.0).check([1, 2])
    Pool(Devices(), 9.0).check([64])
    assert (
        Pool(Devices(), 9.0).not_runnable(64) == Pool(CUDA, 9.0).not_runnable(2) == ""
    )
    # a recipe may begin on a larger world than that of its scenario
    assert "4 ranks and 2 GPUs" in Pool(CUDA, 9.0).not_runnable(4)


@dataclass
class FakeAgent:
    gpus: tuple[int, ...]
    size: int = 4
    hosts: int = 2
    attempt: int = 0

    def members(self) -> list[Member]:
        return [Member(place="", pid=1, gpus=n, local_size=2) for n in self.gpus]


def torchrun(devices: Devices, *gpus: int) -> Place:
    agent: Any = FakeAgent(gpus)
    return Torchrun(devices, 9.0, agent)


def test_under_torchrun_every_machine_counts_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torchrun(CUDA, 2, 2, 2, 2).check([4])
    monkeypatch.setattr(devices, "nccl_version", lambda: (2, 32))
    torchrun(SHARED, 1, 1, 1, 1).check([4])
    torchrun(Devices(), 0, 0, 0, 0).check([4])
    words = "2 ranks and 1 GPU, .*start with --nproc-per-node 1, or let ranks share"
    with pytest.raises(ValueError, match=words):
        torchrun(CUDA, 2, 2, 1, 1).check([4])
    with pytest.raises(ValueError, match="no CUDA device is visible"):
        torchrun(SHARED, 2, 2, 2, 0).check([4])


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_takes_its_own_gpu_or_shares() -> None:
    spec = CUDA.spec(4, 9.0)
    assert [str(worker._device(spec, r)) for r in (0, 1)] == ["cuda:0", "cuda:1"]
    with pytest.raises(RuntimeError, match="rank 2 has no CUDA device of its own: 2"):
        worker._device(spec, 2)
    shared = SHARED.spec(4, 9.0)
    assert [str(worker._device(shared, r)) for r in (2, 3)] == ["cuda:0", "cuda:1"]


@pytest.mark.usefixtures("two_gpus")
def test_the_header_tells_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "gpu_names", lambda self: ["Fake GPU"] * 2)
    seen = [
        make_header(planned=0, preset="", seed=0, arguments=[], place=Pool(d, 9.0))
        for d in (Devices(), CUDA, SHARED)
    ]
    assert [(h.device, h.backend) for h in seen] == [
        ("cpu", "gloo"),
        ("cuda", "nccl"),
        ("cuda", "nccl"),
    ]
    assert seen[1].gpus == ("Fake GPU", "Fake GPU")
    assert seen[0].threads == WorldSpec(world_size=1).threads
    assert seen[0].launcher.name == "pool"


def test_a_replay_line_keeps_the_devices() -> None:
    scenario = "single/1/fp32/sgd/none"
    line = replay_command(OURS, scenario)
    assert line == f"gradparity replay {scenario} --scaler {OURS}"
    line = replay_command(OURS, scenario, SHARED)
    assert line.endswith(f"--scaler {OURS} --device cuda --share-gpus")


@pytest.fixture
def kernels() -> Iterator[Any]:
    """Yield torch's switches of kernels, and restore them afterwards."""
    cuda = torch.backends.cuda
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    flash = cuda.flash_sdp_enabled()
    efficient, cudnn = cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    half = cuda.matmul.allow_fp16_reduced_precision_reduction
    wide = cuda.matmul.allow_bf16_reduced_precision_reduction
    convolutions = torch.backends.cudnn.allow_tf32
    yield cuda
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = convolutions
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(efficient)
    cuda.enable_cudnn_sdp(cudnn)
    cuda.matmul.allow_fp16_reduced_precision_reduction = half
    cuda.matmul.allow_bf16_reduced_precision_reduction = wide


def test_on_cuda_the_same_bits_come_each_time(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's stays
    set_deterministic(torch.device("cpu"))
    assert kernels.flash_sdp_enabled()
    set_deterministic(torch.device("cuda", 0))
    assert not kernels.flash_sdp_enabled() and not kernels.mem_efficient_sdp_enabled()
    assert not kernels.cudnn_sdp_enabled() and kernels.math_sdp_enabled()
    assert kernels.matmul.allow_fp16_reduced_precision_reduction is False
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.allow_tf32 is False


# experts read on the host how many rows each has, which a meta tensor cannot tell
@pytest.mark.parametrize("name", [name for name in MODELS if "experts" not in name])
def test_models_make_no_tensor_on_another_device(name: str) -> None:
    """Models run on the meta device, where mixing devices raises, as on CUDA."""
    device = torch.device("meta")
    model = MODELS[name].make().to(device)
    batch = DATASETS[name.split("-")[0]].batch(0, 0)
    with pytest.raises((RuntimeError, NotImplementedError)):
        loss(model(batch.inputs), batch.targets)  # without the move
    moved = batch.to(device)
    loss(model(moved.inputs), moved.targets).backward()
    OPTIMIZERS["sgd"](list(model.named_parameters())).step()
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


def moves_of_a_run(scenario: Scenario) -> list[str]:
    """Return the device types to which a rank moved batches, or asked for TF32."""
    moves: list[str] = []
    move = Batch.to

    def noted(self: Batch, device: torch.device) -> Batch:
        moves.append(device.type)
        return move(self, device)

    def narrows(device: torch.device) -> bool:
        moves.append(f"asked {device.type}")
        return True

    # the patches apply to the process of this rank alone
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Batch, "to", noted)
        patched.setattr(rank_module, "narrows_products", narrows)
        assert rank_module.observe_rank(scenario, "none", ".").narrows
    return moves


def test_every_batch_is_moved_to_the_device_which_is_asked_how_it_rounds() -> None:
    scenario = Scenario.parse("single/1/fp32/sgd/none/steps=3")
    with Cluster(1) as cluster:
        moves = cluster.run(moves_of_a_run, scenario)
    assert moves == [["cpu", "cpu", "cpu", "asked cpu"]]


def report_on_gpu(folder: Path, *arguments: str) -> Report:
    """Run a command on the GPU; return its report, which must be complete."""
    command = [sys.executable, "-m", "gradparity.conformance", *arguments]
    done = subprocess.run(
        [*command, "--device", "cuda", "--out", str(folder)],
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1, 4), done.stdout + done.stderr
    report = read_report(folder / "report.jsonl")
    assert report.incomplete == ""
    header = report.header
    assert (header.device, header.backend) == ("cuda", "nccl") and header.gpus
    return report


@pytest.fixture
def several_a_gpu() -> None:
    """Skip the test unless NCCL lets ranks share a GPU."""
    if nccl_version() < SHARES:
        pytest.skip(f"needs NCCL {SHARES}, {nccl_version()} is loaded")


@pytest.mark.gpu
def test_the_catalogue_on_nccl_with_one_rank(tmp_path: Path) -> None:
    report = report_on_gpu(tmp_path, *QUICK, "--topology", "single")
    # from a checkpoint of two ranks it cannot go on with one GPU alone
    left = [c for c in report.cases if c.status != "pass"]
    assert len(left) < len(report.cases)
    for case in left if visible_gpus() == 1 else []:
        found = [v.message for v in case.verdicts if v.status == case.status]
        assert case.status == "skipped", (case.scenario, found)
        assert "2 ranks and 1 GPU" in found[0]


@pytest.mark.gpu
@pytest.mark.usefixtures("several_a_gpu")
@pytest.mark.parametrize("topology", ["ddp", "fsdp", "hsdp", "tp", "fsdp+tp", "pp"])
def test_ranks_share_a_gpu(tmp_path: Path, topology: str) -> None:
    options = ["--share-gpus", "--topology", topology]
    report = report_on_gpu(tmp_path, *QUICK, *options)
    assert {c.status for c in report.cases} == {"pass"}
    assert list(report.topologies) == [topology]


@pytest.mark.gpu
@pytest.mark.usefixtures("several_a_gpu")
@pytest.mark.parametrize(
    ("name", "status"), [("SlightlyOff", "fail"), ("InTF32", "inconclusive")]
)
def test_what_departs_on_a_gpu(tmp_path: Path, name: str, status: str) -> None:
    scenario = f"dp2/2/fp32/own/none/model=gradparity.tests.workloads.stacks:{name}"
    options = ["--share-gpus", "--scaler", "none"]
    report = report_on_gpu(tmp_path, "replay", scenario, *options)
    assert {case.status for case in report.cases} == {status}


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
def test_products_that_round_first_are_seen_on_a_gpu() -> None:
    cuda = torch.device("cuda", 0)
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    assert narrows_products(cuda)
    torch.backends.cudnn.allow_tf32 = False
    assert not narrows_products(cuda)
    torch.set_float32_matmul_precision("high")
    assert narrows_products(cuda)


@pytest.mark.gpu(count=2)
def test_two_ranks_on_nccl(tmp_path: Path) -> None:
    report = report_on_gpu(tmp_path, *QUICK, "--topology", "fsdp", "--topology", "tp")
    assert {c.status for c in report.cases} == {"pass"}
    assert list(report.topologies) == ["fsdp", "tp"]


def test_a_departure_of_products_that_round_first_is_inconclusive() -> None:
    of = evidence()
    assert of.parity is not None
    of.parity.add("gradient", [row("gradient", error=2.0)], 1)
    of.ranks[1].steps[2].scale_after = 99.0
    failed = finding(of, "parity.gradient")
    assert failed.status == "fail"
    of.ranks[1].narrows = True
    there = finding(of, "parity.gradient")
    assert there.status == "inconclusive"
    told = "; but products of fp32 numbers round them first on rank 1, as with TF32"
    assert there.message.startswith(failed.message + told)
    # what compares no rounding is a failure there, too
    assert finding(of, "agreement.scale").status == "fail"
    assert finding(of, "parity.update").status == "pass"
    # and products of half precision do not round fp32 numbers
    half = replace(of, scenario=replace(of.scenario, precision="bf16-autocast"))
    assert finding(half, "parity.gradient").status == "fail"


def test_products_that_round_first_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert not narrows_products(cpu)
    exact = F.conv2d

    def rounds(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return exact(given.bfloat16().float(), weight)

    monkeypatch.setattr(F, "conv2d", rounds)
    assert narrows_products(cpu)
