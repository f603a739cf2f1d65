"""Devices and backend of the ranks, and how many ranks share a GPU.

    device   shared   backend   ranks
    cpu      no       gloo      as many as asked for
    cuda     no       NCCL      one per GPU
    cuda     yes      NCCL      several per GPU, from NCCL 2.31 on; only when asked for

Ranks cannot share a GPU over gloo: with CUDA tensors its send raises, and its coalesced
all-gather ends the process by a signal.

References always train on the CPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ...multiprocess import WorldSpec
from ...multiprocess.spec import Isolation
from ..status import UsageError
from . import PRELOAD

__all__ = [
    "SHARES",
    "Devices",
    "device_names",
    "narrows_products",
    "nccl_version",
    "set_deterministic",
    "visible_gpus",
]

SHARES = (2, 31)
"""First NCCL version with NCCL_MULTI_RANK_GPU_ENABLE: several ranks on one GPU."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of the ranks of one run."""

    device: str = "cpu"
    share: bool = False
    """True if several ranks may share a GPU."""
    isolation: Isolation = "pool"
    """Processes of a run: "pool" reuses those of earlier runs, "process" starts new
    ones."""

    def __post_init__(self) -> None:
        if self.share and self.device != "cuda":
            raise UsageError("--share-gpus goes with --device cuda only")

    @property
    def backend(self) -> str:
        """Backend of every process group."""
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def options(self) -> Sequence[str]:
        """Command-line options that select these devices."""
        chosen = [] if self.device == "cpu" else ["--device", self.device]
        fresh = [] if self.isolation == "pool" else ["--isolation", self.isolation]
        return [*chosen, *(["--share-gpus"] if self.share else []), *fresh]

    def spec(self, world: int, timeout_s: float) -> WorldSpec:
        """Return the specification of a world of ``world`` ranks on these devices."""
        return WorldSpec(
            world_size=world,
            backend=self.backend,
            device=self.device,
            share_devices=self.share,
            timeout_s=timeout_s,
            isolation=self.isolation,
            preload=PRELOAD,
        )

    def check(self, ranks: int, gpus: int, way_out: str) -> None:
        """Check before any rank starts that there are enough GPUs.

        Args:
            ranks: largest number of ranks on one machine.
            gpus: number of CUDA devices that these ranks can use.
            way_out: advice on how to choose fewer ranks, for the message.

        Raises:
            UsageError: if there are too few GPUs, or this NCCL cannot share them.
        """
        if self.device == "cpu":
            return
        if gpus == 0:
            limited = os.environ.get("CUDA_VISIBLE_DEVICES")
            cause = "" if limited is None else f" (CUDA_VISIBLE_DEVICES={limited!r})"
            raise UsageError(f"--device cuda: no CUDA device is visible{cause}")
        if ranks <= gpus:
            return
        noun = "GPU" if gpus == 1 else "GPUs"
        start = f"--device cuda: {ranks} ranks and {gpus} {noun}, and"
        if not self.share:
            raise UsageError(
                f"{start} NCCL takes one rank a GPU: {way_out}, or let ranks share "
                "with --share-gpus"
            )
        if (found := nccl_version()) < SHARES:
            mine, least = (".".join(map(str, version)) for version in (found, SHARES))
            raise UsageError(
                f"{start} NCCL {mine} lets no ranks share one, {least} and later do: "
                f"{way_out}, or pip install 'nvidia-nccl-cu13>={least}' (cu12 where "
                "torch is built for CUDA 12)"
            )


def visible_gpus() -> int:
    """Return the number of visible CUDA devices, without creating a CUDA context."""
    return torch.cuda.device_count()


def nccl_version() -> tuple[int, int]:
    """Return the version of the loaded NCCL; torch may be built with another one."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:  # NCCL is a part of torch's own library
        major, minor = torch.cuda.nccl.version()[:2]
        return major, minor
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100


def device_names() -> list[str]:
    """Return the names of the CUDA devices; only for ranks, as it creates a context."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


@torch.no_grad()
def narrows_products(device: torch.device) -> bool:
    """Return True if matrix products round fp32 inputs first, as TF32 does.

    Torch has several settings for this, and some have no effect. So the function tries
    it out: a matrix product and a convolution with the identity are exact in fp32.
    """
    one = torch.eye(64, device=device)
    value = torch.full_like(one, 1.0 + 2.0**-20)
    products = value @ one, F.conv2d(value[..., None, None], one[..., None, None])
    return any(
        bool((product.flatten() != value.flatten()).any()) for product in products
    )


def set_deterministic(device: torch.device) -> None:
    """Make this rank compute the same bits in every run, and fp32 without TF32.

    Bitwise checks compare two runs. On CUDA some kernels sum in the order in which
    their threads arrive, and matrix products may round to TF32 or sum in half
    precision. Uninitialised memory is filled with nan: reading such memory then gives
    nan in every run, whatever its old content was.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # a module property
    if device.type != "cuda":
        return
    # without this setting cuBLAS may sum in another order from run to run
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    # this leaves only the plain attention kernels
    torch.backends.cuda.enable_cudnn_sdp(False)
