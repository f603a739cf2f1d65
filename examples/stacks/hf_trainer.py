r"""transformers' Trainer under FSDP2 as a workload: its own loop trains each step.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.hf_trainer:Stack

Needs transformers and accelerate. Ends with PASS in half a minute. The loss is a mean
over all targets that count: ``average_tokens_across_devices``, the Trainer's default.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from .on_cpu import accelerate_takes_fsdp
from .shared import VOCABULARY, Pair, Tokens

ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "fsdp": True,
    "max_steps": 1,
    "save_strategy": "no",
    "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
}


def prepared(stack: Any) -> Any:
    """Lay the model out and create its optimizer, before ``train()`` would."""
    stack.create_optimizer()
    model, stack.optimizer = stack.accelerator.prepare(stack.model, stack.optimizer)
    stack.model = stack.model_wrapped = model
    return stack


class Stack(Tokens):
    """A tiny Llama under FSDP2."""

    clip_norm = 0.5

    def model(self) -> Any:
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        args = TrainingArguments(**ARGUMENTS, max_grad_norm=self.clip_norm)
        accelerate_takes_fsdp()
        return prepared(Trainer(model, args))

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.args.gradient_accumulation_steps = len(micro_batches)
        stack.get_train_dataloader = lambda: [
            {"input_ids": x, "shift_labels": y, "labels": y} for x, y in micro_batches
        ]
        return stack.train().training_loss, stack.state.log_history[0]["grad_norm"]

    def weights(self, stack: Any) -> dict[str, Any]:
        return dict(stack.model.named_parameters())
