"""Our scaler in Accelerate: the lines between two comments, and no other change.

    torchrun --nproc-per-node 2 examples/trainers/accelerate_fp16.py --steps 12

Needs accelerate; takes about half a minute on two cores.

Prints step, loss and scale; the first steps overflow on purpose and are skipped, which
halves the scale. Saves a checkpoint in --folder (trained); a second run with more
--steps goes on from it. --scaler torch.amp:GradScaler trains with torch's scaler
instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from shared import batch_of, leave, parse, report_step

from gradparity.examples.integrations.use_in_accelerate import use_scaler
from gradparity.fixtures import MODELS, loss


class Count:
    """Number of steps done; saved and loaded with everything else."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the number of steps."""
        self.steps = state["steps"]


def main(argv: Sequence[str] | None = None) -> None:
    """Train, from the checkpoint if there is one, and save a checkpoint at the end."""
    options = parse(__doc__ or "", argv)
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    # swap: from gradparity.scaler import GradScaler
    scaler = options.scaler("cpu", init_scale=options.init_scale, growth_interval=3)
    use_scaler(accelerator, scaler)  # before prepare(), which gives it the optimizer
    # end of swap
    torch.manual_seed(0)
    model = MODELS["text"].make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    done = Count()
    # save_state and load_state take it with them: without it a resumed run would begin
    # at step 0 with trained weights.
    accelerator.register_for_checkpointing(done)
    checkpoint = options.folder / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    while done.steps < options.steps:
        # Each rank trains on its part of the rows; prepare() averages the gradients.
        share = batch_of(done.steps, options.rank, options.ranks)
        optimizer.zero_grad()
        value = loss(model(share.inputs), share.targets)
        accelerator.backward(value)
        optimizer.step()
        report_step(options, done.steps, value.item(), scaler.get_scale())
        done.steps += 1
    accelerator.save_state(str(checkpoint))


if __name__ == "__main__":
    main()
    leave()
