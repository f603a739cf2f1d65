r"""PEFT's adapters on a tiny Llama, under FSDP2 and under transformers' own plan.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.peft_adapters:Lora

Needs peft and transformers. Lora, Dora, Ia3, ModulesToSave and PlanLora end with PASS,
PlanModulesToSave with FAIL: its head is not trained. Each takes about half a minute
on two cores.

Adapters are put on the model before FSDP2 shards it, and on top of a model that was
loaded under its tensor-parallel plan, as PEFT documents. They begin with random values:
an adapter of zeros has no gradient in its first half.
"""

import tempfile
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from .shared import VOCABULARY, Tokens

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COLUMNS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]


def lora(**settings: Any) -> LoraConfig:
    """Of random values."""
    return LoraConfig(r=4, init_lora_weights=False, **settings)


class Lora(Tokens):
    """Under FSDP2: a unit for each layer."""

    config: PeftConfig = lora(target_modules=ALL)

    def model(self) -> nn.Module:
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            use_cache=False, attn_implementation="eager",
        )  # fmt: skip
        made: nn.Module = get_peft_model(
            LlamaForCausalLM(config), deepcopy(self.config)
        )
        return made

    def parallelize(self, model: Any, mesh: DeviceMesh) -> nn.Module:
        # Adapters are inside of the layers by now, so each unit shards them with it.
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model  # type: ignore[no-any-return]  # its types are not followed


class Dora(Lora):
    """The size of each column trains apart."""

    config = lora(target_modules=ALL, use_dora=True)


class Ia3(Lora):
    """Vectors that scale keys, values and hidden features."""

    config = IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"], init_ia3_weights=False,
    )  # fmt: skip


class ModulesToSave(Lora):
    """Embedding and head train whole."""

    config = lora(target_modules=ALL, modules_to_save=["embed_tokens", "lm_head"])


class PlanLora(Lora):
    """Under the plan; of the layers that it splits by columns."""

    meshes = ({"tp": 2},)
    config = lora(target_modules=COLUMNS)

    def parallelize(self, model: Any, mesh: DeviceMesh) -> nn.Module:
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            if dist.get_rank() == 0:
                model.save_pretrained(f"{folder}/adapter")
                deepcopy(model).unload().save_pretrained(f"{folder}/base")
            dist.broadcast_object_list(shared)  # the folder of rank 0
            base = LlamaForCausalLM.from_pretrained(
                f"{shared[0]}/base", dtype=torch.float32, attn_implementation="eager",
                distributed_config=DistributedConfig(tp_size=mesh.size()),
            )  # fmt: skip
            base = base.double().float()  # PEFT copies modules; not as they are loaded
            adapter = f"{shared[0]}/adapter"
            made: nn.Module = PeftModel.from_pretrained(
                base, adapter, is_trainable=True
            )
            dist.barrier()  # rank 0 removes the folder once all have read it
        return made


class PlanModulesToSave(PlanLora):
    """The head is in the plan: **it is not trained**."""

    config = lora(target_modules=COLUMNS, modules_to_save=["lm_head"])
