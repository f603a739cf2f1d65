"""Our scaler in PyTorch Lightning: a mixed precision plugin takes it.

    python examples/trainers/lightning_fp16.py --steps 12
    torchrun --nproc-per-node 2 examples/trainers/lightning_fp16.py --steps 12

Needs pytorch-lightning; takes about half a minute on two cores.

Prints step, loss and scale; the first steps overflow on purpose and are skipped, which
halves the scale. Saves a checkpoint in --folder (trained); a second run with more
--steps goes on from it. --scaler torch.amp:GradScaler trains with torch's scaler
instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from shared import Options, batch_of, leave, parse, report_step
from torch import Tensor
from torch.utils.data import DataLoader

from gradparity.examples.integrations.use_in_lightning import MixedPrecision
from gradparity.fixtures import MODELS, loss

EPOCH = 3
"""Number of steps in an epoch; Lightning resumes at the start of an epoch."""


class Text(LightningModule):  # type: ignore[misc]  # its types are not followed
    """A small transformer on English text."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MODELS["text"].make()
        self.options = options

    def training_step(self, number: int, _index: int) -> Tensor:
        """Return the loss of one batch."""
        step = self.current_epoch * EPOCH + number
        share = batch_of(step, self.options.rank, self.options.ranks)
        return loss(self.model(share.inputs), share.targets)

    def on_train_batch_end(self, outputs: Any, number: int, _index: int) -> None:
        """Write down loss and scale."""
        step = self.current_epoch * EPOCH + number
        scale = self.trainer.precision_plugin.scaler.get_scale()
        report_step(self.options, step, outputs["loss"].item(), scale)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, from the checkpoint if there is one, and save a checkpoint at the end."""
    options = parse(__doc__ or "", argv)
    # swap: from gradparity.scaler import GradScaler
    scaler = options.scaler("cpu", init_scale=options.init_scale, growth_interval=3)
    plugin = MixedPrecision(scaler, device="cpu")  # and no precision= below
    # end of swap
    trainer = Trainer(
        plugins=[plugin],
        accelerator="cpu",
        strategy="ddp" if options.ranks > 1 else "auto",
        devices=options.ranks,
        # Lightning resumes at the start of an epoch, so steps are a multiple of EPOCH.
        max_epochs=options.steps // EPOCH,
        use_distributed_sampler=False,  # each rank takes its part of every batch
        enable_checkpointing=False,  # one at the end is enough here
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = options.folder / "last.ckpt"
    # The data are the numbers of the steps: training_step draws the batch itself.
    numbers = DataLoader(range(EPOCH), batch_size=None)  # type: ignore[arg-type,var-annotated]  # a range will do
    resume = checkpoint if checkpoint.exists() else None
    trainer.fit(Text(options), numbers, ckpt_path=resume, weights_only=True)
    trainer.save_checkpoint(checkpoint)


if __name__ == "__main__":
    main()
    leave()
