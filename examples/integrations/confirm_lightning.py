"""Without gradparity: PyTorch Lightning 2.6.6 in fp16 on one process.

    python examples/integrations/confirm_lightning.py

Needs pytorch-lightning. Prints a line for each case, in under half a minute:

1. The schedule and an average of the weights move on a step that torch's scaler skips.
2. ``ModelParallelStrategy`` refuses ``precision="16-mixed"``, and takes the plugin.
3. ``FSDPPrecision("16-mixed", scaler=...)``, which its signature offers, is refused.
"""

from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import EMAWeightAveraging
from pytorch_lightning.plugins.precision import FSDPPrecision, MixedPrecision
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

QUIET: dict[str, Any] = dict(
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    accelerator="cpu",
)


class Module(LightningModule):  # type: ignore[misc]  # its types are not followed
    """Learns in steps 0 and 2; the loss of step 1 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.told: list[tuple[int, bool]] = []

    def training_step(self, batch: int, index: int) -> Tensor:
        """Return the loss."""
        scale = float("inf") if index == 1 else 1.0
        loss: Tensor = self.layer(torch.ones(2, 4)).square().mean() * scale
        return loss

    def configure_optimizers(self) -> Any:
        """Return SGD and a schedule that is stepped after each step."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        schedule = {"scheduler": self.scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Watch(EMAWeightAveraging):  # type: ignore[misc]
    """Prints after each batch how often weights were averaged, and the schedule."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        """Update the average, then print."""
        super().on_train_batch_end(trainer, module, *args)
        averaged = int(self._average_model.n_averaged)
        scale = trainer.precision_plugin.scaler.get_scale()
        print(
            f"after a batch: scale {scale:g}, averaged {averaged} times, "
            f"schedule at {module.scheduler.last_epoch}"
        )


def main() -> None:
    """Train three steps, then try the two strategies; print the results."""
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    trainer = Trainer(plugins=[plugin], max_steps=3, callbacks=[Watch()], **QUIET)
    data: Any = range(3)
    trainer.fit(Module(), DataLoader(data, batch_size=None))
    for settings in ({"precision": "16-mixed"}, {"plugins": [plugin]}):
        try:
            Trainer(strategy=ModelParallelStrategy(), **settings, **QUIET)
            told = "taken"
        except ValueError as error:
            told = f"refused: {str(error)[:60]}"
        print(f"ModelParallelStrategy with {next(iter(settings))}: {told}")
    try:
        FSDPPrecision("16-mixed", scaler=scaler)
        told = "taken"
    except ValueError as error:
        told = f"refused: {str(error)[:60]}"
    print(f"FSDPPrecision with a scaler: {told}")


if __name__ == "__main__":
    main()
