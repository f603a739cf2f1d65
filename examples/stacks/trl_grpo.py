r"""TRL's GRPOTrainer under FSDP2 as a workload: rewards, advantages, loss and step.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.trl_grpo:Grpo

Needs trl, as docs/stacks.md says. Ends with PASS in a minute. Completions are given;
they are one group, and its advantages need the rewards of both ranks.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import hf_trainer
from .on_cpu import accelerate_takes_fsdp
from .shared import Pair
from .trl_on_cpu import ROWS, GRPOConfig, GRPOTrainer, tokenizer


def reward(completion_ids: list[list[int]], **more: Any) -> list[float]:
    """Return any function of the completions."""
    return [sum(ids) % 7.0 for ids in completion_ids]


class Grpo(hf_trainer.Stack):
    """A tiny Llama. A row is a prompt of two tokens and a completion of one to six."""

    reference = "one rank"
    most = 6

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        args = GRPOConfig(
            **hf_trainer.ARGUMENTS,
            bf16=False,
            gradient_checkpointing=False,
            max_grad_norm=self.clip_norm,
            max_completion_length=self.most,
            num_generations=24,
            per_device_train_batch_size=24 // mesh.size(),
        )
        accelerate_takes_fsdp()
        stack = GRPOTrainer(model, reward, args, ROWS, processing_class=tokenizer())
        return hf_trainer.prepared(stack)

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        parts = stack.args.steps_per_generation = len(micro_batches)
        stack.args.gradient_accumulation_steps = parts  # TRL cuts the rows again
        batches = [zip(*pair, strict=True) for pair in micro_batches]
        rows = [(x.tolist(), int((y != -100).sum())) for xy in batches for x, y in xy]
        stack.rollout_func = lambda prompts, trainer: {
            "prompt_ids": [row[:2] for row, _ in rows],
            "completion_ids": [row[2 : 2 + n] for row, n in rows],
            "logprobs": None,
        }
        stack.get_train_dataloader = lambda: [[{"prompt": ""}] * len(rows)] * parts
        return stack.train().training_loss, stack.state.log_history[0]["grad_norm"]
