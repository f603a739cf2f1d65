"""peft: modules_to_save is not trained under a tensor-parallel plan.

python peft-modules-to-save-plan.py; exit code 1 where the bug shows.

LoRA on a tiny Llama of random weights; its head and last norm are to be trained whole.
"""

# - The frame, the same in all scripts. Exit code 1: bug, 0: no bug, 3: no verdict.
import os
import sys
import tempfile
from importlib.metadata import version
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def crashed(*error: Any) -> NoReturn:
    """Print an error, such as a failed import, and exit with 3: no verdict."""
    sys.__excepthook__(*error)
    sys.exit(3)


def as_rank(rank: int, main: Any, given: Any, ranks: int, folder: str) -> None:
    """Run main on one rank of a process group, and save its result."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ |= {name: str(number) for name, number in where.items()}
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=ranks
    )
    try:
        torch.save(main(rank, *given), f"{folder}/{rank}.pt")
        dist.barrier()  # no rank leaves while another still needs it
    finally:
        dist.destroy_process_group()


def on_ranks(main: Any, *given: Any, ranks: int = 2) -> list[Any]:
    """Run main(rank, *given) on all ranks; return their results, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(as_rank, (main, given, ranks, folder), ranks)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)]


def off(found: Any, exact: torch.Tensor) -> float:
    """Return the relative error of a gradient; a missing one counts as zero."""
    return float(((0 if found is None else found) - exact).norm() / exact.norm())


def tell(bug: bool, package: str, **lines: str) -> NoReturn:
    """Print versions, lines and verdict; exit with 1 for a bug, else 0."""
    versions = {name: version(name) for name in dict.fromkeys((package, "torch"))}
    print("versions:", *(f"{name} {number}" for name, number in versions.items()))
    for key, text in lines.items():
        print(f"{key.replace('_', ' ')}: {text}")
    print("verdict:", "bug" if bug else "no bug", flush=True)
    sys.exit(int(bug))


sys.excepthook = crashed
# - The finding
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

NAMES = {n: f"{n}.modules_to_save.default.weight" for n in ("lm_head", "norm")}
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="eager",
)


def trained(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Return the gradients of the modules to save after one backward."""
    adapter = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=list(NAMES))
    # .to() also gives each rank a storage that can be copied, as PEFT does
    model = get_peft_model(model.to(torch.float64), adapter).to(dtype)
    rows = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    model(input_ids=rows, labels=rows).loss.backward()
    named = {n.rsplit("model.", 1)[-1]: p for n, p in model.named_parameters()}
    return {name: named[full].grad for name, full in NAMES.items()}


def rank_main(rank: int, folder: str) -> dict[str, Tensor | None]:
    """Return the gradients of `trained` for a model that was loaded under its plan."""
    plan = DistributedConfig(tp_size=2)
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=plan)
    return trained(model, torch.float32)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = on_ranks(rank_main, folder)[0]
    exact = trained(model, torch.float64)
    errors = {name: off(found[name], right) for name, right in exact.items()}
    for name, error in errors.items():
        none = ", there is none" if found[name] is None else ""
        print(f"the gradient of {NAMES[name]} is off by {error:.1e}{none}")
    tell(
        not errors["lm_head"] < 1e-3,
        "peft",
        parameter=NAMES["lm_head"],
        relative_error=f"{errors['lm_head']:.2e}",
        reference=f"one process, fp64; norm, outside the plan: {errors['norm']:.0e}",
    )
