"""Accelerate, and with it transformers' Trainer: what ``accelerator.scaler`` leaves."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..grad_scaler import GradScaler


def use_scaler(accelerator: Any, scaler: GradScaler) -> None:
    """Take ``scaler``, and keep its state through ``load_state``.

    Under FSDP2 ``load_state`` makes the optimizer's state by a step of the prepared
    optimizer, which moves the scaler that has just been loaded; it is loaded again.
    On a CPU, where Accelerate has no fp16, its calls to the scaler are switched on.

    Args:
        accelerator: made with ``mixed_precision="fp16"``, before ``prepare``.
        scaler: of the accelerator's device.
    """
    accelerator.scaler = scaler
    accelerator.native_amp = True

    def load_again(_models: Any, folder: str) -> None:
        path = os.path.join(folder, "scaler.pt")
        if os.path.exists(path):
            scaler.load_state_dict(torch.load(path, weights_only=True))

    accelerator.register_load_state_pre_hook(load_again)
