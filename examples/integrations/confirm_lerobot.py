"""Without gradparity: lerobot 0.4.4 in fp16 on one process, by its own functions.

    python examples/integrations/confirm_lerobot.py

``update_policy`` (scripts/lerobot_train.py, line 59) and ``save_training_state``
(utils/train_utils.py, line 112) run as they are, on an ``Accelerator`` made as in line
184 of the former. Accelerate makes no fp16 scaler on a CPU: torch's is set by hand.
lerobot is installed with ``--no-deps``.

1. An overflow: the step is skipped, and the schedule moves.
2. The files of a checkpoint: none has the scaler.
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from absent import stand_in  # type: ignore[import-not-found]  # beside this script
from accelerate import Accelerator
from torch import Tensor, nn

stand_in("lerobot")

from lerobot.scripts.lerobot_train import update_policy  # noqa: E402
from lerobot.utils.train_utils import save_training_state  # noqa: E402


class Policy(nn.Module):
    """One layer whose forward returns the loss, as lerobot expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, factor: float) -> tuple[Tensor, dict[str, Any]]:
        """Return a loss and no metrics."""
        return self.layer(torch.ones(2, 4)).square().mean() * factor, {}


def main() -> None:
    """Print a line for the overflow, and one for the checkpoint."""
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    scaler = accelerator.scaler = torch.amp.GradScaler("cpu", 1024.0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    policy, *prepared = accelerator.prepare(policy, optimizer, scheduler)
    accelerator.native_amp = True

    def update(factor: float) -> None:
        update_policy(
            SimpleNamespace(),
            policy,
            factor,
            prepared[0],
            1.0,
            accelerator,
            prepared[1],
        )

    update(1.0)
    before = [p.detach().clone() for p in policy.parameters()]
    moved = scheduler.last_epoch
    update(float("inf"))
    same = all(map(torch.equal, policy.parameters(), before))
    skipped, moved = (
        accelerator.optimizer_step_was_skipped,
        scheduler.last_epoch - moved,
    )
    print(
        f"overflow: parameters unchanged {same}, skipped {skipped}, scale "
        f"{scaler.get_scale():g}, schedule moved by {moved}"
    )
    with tempfile.TemporaryDirectory() as folder:
        save_training_state(Path(folder), 2, optimizer, scheduler)
        files = sorted(p.name for p in Path(folder).rglob("*") if p.is_file())
    print(f"checkpoint: {', '.join(files)}")


if __name__ == "__main__":
    main()
