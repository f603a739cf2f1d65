r"""transformers' Trainer under FSDP2 as a workload: its own loop trains each step.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.hf_trainer:Stack

Needs transformers and accelerate. Ends with PASS in about half a minute on two cores.

The loss is a mean over all targets that count, on all ranks and in all micro-batches:
the Trainer computes it so by ``average_tokens_across_devices``, its default.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from .on_cpu import accelerate_takes_fsdp
from .shared import VOCABULARY, Pair, Tokens


class Stack(Tokens):
    """A tiny Llama."""

    clip_norm = 0.5

    def model(self) -> Any:
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32,
            num_hidden_layers=2, num_attention_heads=2, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        args = TrainingArguments(
            use_cpu=True, fsdp=True,
            fsdp_config={"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
            max_steps=1, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant",
            max_grad_norm=self.clip_norm, logging_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        accelerate_takes_fsdp()
        stack = Trainer(model, args)
        stack.create_optimizer()  # train() would do it, and lay the model out, too late
        stack.model, stack.optimizer = stack.accelerator.prepare(model, stack.optimizer)
        stack.model_wrapped = stack.model
        return stack

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        # train() runs max_steps=1 step, on these micro-batches.
        stack.args.gradient_accumulation_steps = len(micro_batches)
        stack.get_train_dataloader = lambda: [
            {"input_ids": x, "shift_labels": y, "labels": y} for x, y in micro_batches
        ]
        loss = stack.train().training_loss
        return loss, stack.state.log_history[0]["grad_norm"]

    def weights(self, stack: Any) -> dict[str, Any]:
        return dict(stack.model.named_parameters())
