"""peft: modules_to_save is not trained under a tensor-parallel plan.

python peft-modules-to-save-plan.py; exit code 1 where the bug shows.

LoRA on a tiny Llama of random weights; its head and last norm are to be trained whole.
"""

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

RANKS = 2
NAMES = {n: f"{n}.modules_to_save.default.weight" for n in ("lm_head", "norm")}
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager",
)  # fmt: skip


def trained(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """The gradients of the modules to save, after one backward."""
    adapter = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=list(NAMES))
    # .to() also gives each rank a storage that can be copied, as PEFT does
    model = get_peft_model(model.to(torch.float64), adapter).to(dtype)
    rows = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    model(input_ids=rows, labels=rows).loss.backward()
    named = {n.rsplit("model.", 1)[-1]: p for n, p in model.named_parameters()}
    return {name: named[full].grad for name, full in NAMES.items()}


def rank_main(rank: int, folder: str, results: Any) -> None:
    """Of the model under its own plan."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", f"file://{folder}/s", rank=rank, world_size=RANKS)
    plan = DistributedConfig(tp_size=RANKS)
    model = LlamaForCausalLM.from_pretrained(f"{folder}/model", distributed_config=plan)
    found = trained(model, torch.float32)
    if rank == 0:
        results.put({n: None if g is None else g.tolist() for n, g in found.items()})
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Print what was found."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/model")
        mp.spawn(rank_main, (folder, results), RANKS)
        found = results.get()
    off = {}
    for name, right in trained(model, torch.float64).items():
        assert right is not None
        grad = torch.zeros(1) if found[name] is None else torch.tensor(found[name])
        off[name] = float((grad - right).norm() / right.norm())
        none = ", there is none" if found[name] is None else ""
        print(f"the gradient of {NAMES[name]} is off by {off[name]:.1e}{none}")
    print(f"parameter: {NAMES['lm_head']}")
    print(f"relative error: {off['lm_head']:.2e}")
    print(
        f"reference: one process, fp64; norm, outside the plan, {off['norm']:.0e} off"
    )
    print("verdict:", "bug" if off["lm_head"] > 1e-3 else "no bug")
    return int(off["lm_head"] > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
