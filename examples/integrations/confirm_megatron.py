"""Without gradparity: two scalers of a Megatron-Core 0.16.1 chain drift apart.

    python examples/integrations/confirm_megatron.py

Needs megatron-core. Prints two lines, in under half a minute; the last one says
"gradients 1 and 0.5", where both should be 1.

After an overflow in the first of two optimizers, the loss is scaled by the scale of the
first, but the second still divides by its own scale. Runs on the CPU.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer

tensor = torch.tensor


def on_cpu(*args: Any, device: Any = None, **settings: Any) -> Any:
    """Make a tensor on the CPU, whatever device is asked for."""
    return tensor(*args, **settings)


def part() -> Any:
    """Return a stand-in for an optimizer with one parameter and its own scaler."""
    made: Any = SimpleNamespace(is_stub_optimizer=False, found_inf=torch.zeros(1))
    made.parameter = torch.nn.Parameter(torch.zeros(1))
    made.config = SimpleNamespace(timers=None)
    made.grad_scaler = DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 1000, 1)
    made.get_loss_scale = lambda: made.grad_scaler.scale
    made.get_grad_stats_parallel_group = lambda: None
    made._copy_model_grads_to_main_grads = lambda: None
    made._collect_main_grad_data_for_unscaling = lambda: [made.parameter.grad.data]
    theirs = MixedPrecisionOptimizer
    made._unscale_main_grads_and_check_for_nan = lambda: (
        theirs._unscale_main_grads_and_check_for_nan(made)
    )
    made.prepare_grads = lambda: theirs.prepare_grads(made)
    return made


def main() -> None:
    """Print the gradient that each optimizer gets for a true gradient of 1."""
    with (
        patch("torch.tensor", on_cpu),
        patch("torch.distributed.all_reduce", lambda *_, **__: None),
    ):
        dense, experts = part(), part()
        chain = ChainedOptimizer([dense, experts])
        for step, bad in enumerate((True, False)):
            scale = float(chain.get_loss_scale())
            first = float("inf") if bad else scale
            dense.parameter.grad = torch.tensor([first])
            experts.parameter.grad = torch.tensor([scale])
            skipped = chain.prepare_grads()
            print(
                f"step {step}: loss scaled by {scale:g}, skipped {skipped}, "
                f"gradients {dense.parameter.grad.item():g} and "
                f"{experts.parameter.grad.item():g}"
            )


if __name__ == "__main__":
    main()
