"""Without gradparity: Qwen3's plan multiplies accumulated gradients by the ranks.

    torchrun --nproc-per-node 2 examples/stacks/confirm_qwen3.py

Needs transformers. The same rows in one backward and in two give the same gradient in
one process, and another one under transformers' tensor-parallel plan. Prints two lines
in under a minute: a difference near 1e-7 in one process, near 1 under the plan.
"""

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    use_cache=False,
    attn_implementation="eager",
)


def gradients(model: Qwen3ForCausalLM, parts: int) -> dict[str, Tensor]:
    """Return gradients of the mean over 4 rows, from ``parts`` backward passes."""
    rows = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    model.zero_grad()  # to None: the gradients that were returned stay
    for tokens in rows.chunk(parts):
        (model(input_ids=tokens, labels=tokens).loss / parts).backward()
    grads = [(n, p.grad) for n, p in model.named_parameters()]
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads}


def worst(model: Qwen3ForCausalLM) -> str:
    """Describe the parameter whose gradient changes most with two backward passes."""
    once, twice = gradients(model, 1), gradients(model, 2)
    off = {n: float((twice[n] - once[n]).norm() / once[n].norm()) for n in once}
    name = max(off, key=off.__getitem__)
    return f"{name} differs by {off[name]:.1e} between one backward and two"


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Qwen3ForCausalLM(CONFIG)
with tempfile.TemporaryDirectory() as folder:
    shared = [folder]
    if dist.get_rank() == 0:
        print("one process:", worst(model))
        model.save_pretrained(folder)
    dist.broadcast_object_list(shared)
    sharded = Qwen3ForCausalLM.from_pretrained(
        shared[0], distributed_config=DistributedConfig(tp_size=2)
    )
    dist.barrier()
found = worst(sharded)
if dist.get_rank() == 0:
    print("under the plan:", found)
dist.destroy_process_group()
