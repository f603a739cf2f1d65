r"""OLMo-core's train module with a small OLMo 2, as workloads; see docs/stacks.md.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.olmo_core_llama:Fsdp

Needs ai2-olmo-core. Ends with PASS in a minute or two.
"""

from typing import Any

import torch

from .olmo_on_cpu import Metrics, another_mesh, load_whole
from .shared import VOCABULARY, Named, Pair, Tokens

# isort: split
from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import train_module as olmo

SHAPE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": VOCABULARY}


class Fsdp(Tokens):
    """FSDP; ranks have equal numbers of targets, as each divides by its own number."""

    clip_norm, most = 1.0, 6

    def model(self) -> Any:
        order = TransformerBlockType.reordered_norm
        config = TransformerConfig.llama_like(**SHAPE, qk_norm=True, block_name=order)
        model = config.build(init_device="cpu")
        model.init_weights(device=torch.device("cpu"))
        return model

    def optimizer(self, parameters: Named) -> Any:
        return AdamWConfig.optimizer()([p for _, p in parameters], lr=1e-2)

    def settings(self, mesh: Any) -> dict[str, Any]:
        return {"dp_config": olmo.TransformerDataParallelConfig(name="fsdp")}

    def parallelize(self, model: Any, mesh: Any) -> Any:
        another_mesh()
        weights = {name: w.clone() for name, w in model.state_dict().items()}
        given = self.settings(mesh) | {"max_grad_norm": self.clip_norm}
        stack = olmo.TransformerTrainModule(model, AdamWConfig(lr=1e-2), 8, 8, **given)
        load_whole(stack, weights)  # it has drawn its own
        return stack

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        tokens, labels = map(torch.cat, zip(*micro_batches, strict=True))
        stack.rank_microbatch_size = micro_batches[0][0].numel()
        stack._attach_trainer(seen := Metrics())
        stack.zero_grads()
        stack.train_batch({"input_ids": tokens, "labels": labels})
        stack.optim_step()
        return seen.found["loss"], seen.found["total grad norm"]

    def weights(self, stack: Any) -> Any:
        return dict(stack.model.named_parameters())
