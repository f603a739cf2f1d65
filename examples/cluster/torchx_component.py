"""The catalogue as a TorchX component, for any of its schedulers.

torchx run --scheduler SCHEDULER torchx_component.py:conformance \
    --scaler mypackage.mymodule:MyScaler --j 2x2 -- --world-size 4
"""

import torchx.specs as specs
from torchx.components.dist import ddp


def conformance(
    *options: str,
    scaler: str,
    j: str = "1x2",
    image: str = "registry.example/gradparity:latest",
    out: str = "parity-report",
    cpu: int = 4,
    gpu: int = 0,
    mem_mb: int = 8192,
) -> specs.AppDef:
    """Run the catalogue with torchrun and write one report.

    Args:
        options: further options of ``gradparity run``.
        scaler: scaler to test, ``module:attribute``.
        j: number of nodes x ranks on each node.
        image: container image with torch, gradparity and the scaler.
        out: folder of the report, on rank 0's host.
        cpu: cores of each node.
        gpu: GPUs of each node; with them pass ``--device cuda`` as an option.
        mem_mb: memory of each node in MB.
    """
    return ddp(
        "run",
        "--scaler",
        scaler,
        "--out",
        out,
        *options,
        m="gradparity.conformance",
        name="gradparity",
        image=image,
        j=j,
        cpu=cpu,
        gpu=gpu,
        memMB=mem_mb,
        env={"OMP_NUM_THREADS": "1"},
    )
