r"""PEFT's adapters on a tiny Llama under FSDP2 as workloads.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.peft_adapters:Lora

Needs peft and transformers. Each class ends with PASS in half a minute on two cores.
"""

from copy import deepcopy
from typing import Any

from peft import IA3Config, LoraConfig, PeftConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from .shared import VOCABULARY, Tokens


def lora(targets: Any = "all-linear", **settings: Any) -> LoraConfig:
    """Return LoRA settings with random initial values; zeros would give no gradient."""
    return LoraConfig(r=4, init_lora_weights=False, target_modules=targets, **settings)


class Lora(Tokens):
    """LoRA: adapters are added before FSDP2 shards the model, layer by layer."""

    config: PeftConfig = lora()

    def model(self) -> Any:
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
            attn_implementation="eager",
        )
        return get_peft_model(LlamaForCausalLM(config), deepcopy(self.config))

    def parallelize(self, model: Any, mesh: Any) -> Any:
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class Dora(Lora):
    """DoRA: the size of each column is trained as a separate parameter."""

    config = lora(use_dora=True)


class ModulesToSave(Lora):
    """LoRA whose embedding and head are trained whole."""

    config = lora(modules_to_save=["embed_tokens", "lm_head"])


class Ia3(Lora):
    """IA3: vectors scale keys, values and hidden features."""

    config = IA3Config(init_ia3_weights=False)
