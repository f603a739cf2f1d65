r"""TRL's SFTTrainer under FSDP2 as workloads: its loss in the loop of transformers.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.trl_sft:Sft

Needs trl, as docs/stacks.md says. Sft ends with PASS in a minute, HeadApart with FAIL.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlavaConfig, LlavaForConditionalGeneration

from . import hf_trainer
from .on_cpu import accelerate_takes_fsdp
from .shared import VOCABULARY, Pair
from .trl_on_cpu import ROWS, SFTConfig, SFTTrainer, tokenizer

SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2}


class Sft(hf_trainer.Stack):
    """A tiny Llama whose layers, embedding, and norm with head are units of FSDP2."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        args = SFTConfig(
            **hf_trainer.ARGUMENTS,
            bf16=False,
            gradient_checkpointing=False,
            max_grad_norm=self.clip_norm,
            dataset_kwargs={"skip_prepare_dataset": 1},
        )
        accelerate_takes_fsdp()
        words = tokenizer()
        stack = SFTTrainer(model, args, train_dataset=ROWS, processing_class=words)
        return hf_trainer.prepared(stack)

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.args.gradient_accumulation_steps = len(micro_batches)
        stack.get_train_dataloader = lambda: [  # TRL shifts targets; the last is none
            {"input_ids": x, "attention_mask": x >= 0, "labels": y.roll(1, 1)}
            for x, y in micro_batches
        ]
        loss = stack.train().training_loss
        return loss, stack.state.log_history[0]["grad_norm"]


class HeadApart(Sft):
    """Faulty: a tiny LLaVA, text only; see docs/wild/trl-fused-lm-head.md."""

    def model(self) -> Any:
        text, tower = {"vocab_size": VOCABULARY}, {"image_size": 32, "patch_size": 16}
        config = LlavaConfig(text_config=text | SHAPE, vision_config=tower | SHAPE)
        return LlavaForConditionalGeneration(config)
