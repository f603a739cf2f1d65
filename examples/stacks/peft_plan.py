r"""PEFT's LoRA on a tiny Llama under transformers' own tensor-parallel plan.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.peft_plan:PlanLora

Needs peft and transformers. PlanLora ends with PASS, PlanModulesToSave with FAIL: its
head is not trained. Each takes about half a minute on two cores.

The adapter is loaded on top of a model that was loaded under the plan, as PEFT
documents.
"""

import tempfile
from copy import deepcopy
from typing import Any

import torch.distributed as dist
from peft import PeftModel
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from .peft_adapters import Lora, lora

COLUMNS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]


class PlanLora(Lora):
    """Adapters of the layers that the plan splits by columns."""

    meshes = ({"tp": 2},)
    config = lora(COLUMNS)

    def parallelize(self, model: Any, mesh: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            if dist.get_rank() == 0:
                model.save_pretrained(f"{folder}/adapter")
                deepcopy(model).unload().save_pretrained(f"{folder}/base")
            dist.broadcast_object_list(shared)  # the folder of rank 0
            base = LlamaForCausalLM.from_pretrained(
                f"{shared[0]}/base",
                attn_implementation="eager",
                distributed_config=DistributedConfig(tp_size=mesh.size()),
            )
            base = base.double().float()  # PEFT copies modules; not as they are loaded
            made = PeftModel.from_pretrained(
                base, f"{shared[0]}/adapter", is_trainable=True
            )
            dist.barrier()  # rank 0 removes the folder once all have read it
        return made


class PlanModulesToSave(PlanLora):
    """Faulty: the head is in the plan, and **it is not trained**."""

    config = lora(COLUMNS, modules_to_save=["lm_head"])
