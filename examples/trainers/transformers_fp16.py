"""Our scaler in Hugging Face's Trainer: given to its accelerator before ``train``.

    python examples/trainers/transformers_fp16.py --steps 12
    torchrun --nproc-per-node 2 examples/trainers/transformers_fp16.py --steps 12

Needs transformers and accelerate; takes about half a minute on two cores.

Prints step, loss and scale; the first steps overflow on purpose and are skipped, which
halves the scale. Saves a checkpoint in --folder (trained); a second run with more
--steps goes on from it. --scaler torch.amp:GradScaler trains with torch's scaler
instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from shared import Options, batch_of, leave, parse, report_step
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from gradparity.examples.integrations.use_in_accelerate import use_scaler
from gradparity.fixtures import DATASETS, MODELS, loss

ROWS = DATASETS["text"].batch_size


class Text(nn.Module):
    """A small transformer on English text that returns its loss, as Trainer needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MODELS["text"].make()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of (B, T) bytes and their next bytes."""
        return {"loss": loss(self.model(inputs), labels)}


class Rows(IterableDataset[dict[str, Tensor]]):
    """All rows of all batches; the Trainer splits them and skips those done."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        step = 0
        # Without an end: max_steps ends the training.
        while True:
            batch = batch_of(step, 0, 1)
            for row in range(ROWS):
                yield {"inputs": batch.inputs[row], "labels": batch.targets[row]}
            step += 1


class Told(Trainer):  # type: ignore[misc]  # its types are not followed
    """Trainer that writes down loss and scale of each step."""

    def __init__(self, options: Options, **settings: Any) -> None:
        super().__init__(**settings)
        self.options = options

    def training_step(self, *args: Any, **settings: Any) -> Tensor:
        """Run forward and backward, and write down loss and current scale."""
        value: Tensor = super().training_step(*args, **settings)
        scale = self.accelerator.scaler.get_scale()
        report_step(self.options, self.state.global_step, value.item(), scale)
        return value


def main(argv: Sequence[str] | None = None) -> None:
    """Train, from the checkpoint if there is one, and save a checkpoint at the end."""
    options = parse(__doc__ or "", argv)
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        # All ranks together train on the batch that the other examples have.
        per_device_train_batch_size=ROWS // options.ranks,
        max_steps=options.steps,
        save_steps=options.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        optim="adamw_torch",
        use_cpu=True,
        fp16=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Told(options, model=Text(), args=arguments, train_dataset=Rows())
    # swap: from gradparity.scaler import GradScaler
    scaler = options.scaler("cpu", init_scale=options.init_scale, growth_interval=3)
    use_scaler(trainer.accelerator, scaler)  # before train(), which prepares it all
    # end of swap
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(options.folder)))


if __name__ == "__main__":
    main()
    leave()
