"""trl: under FSDP2 the fused LM head loses the gradients of other ranks.

python trl-fused-lm-head.py; exit code 1 where the bug shows.
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
import importlib.util
from unittest.mock import MagicMock

from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

reads_data = "datasets", "pandas", "pyarrow", "pyarrow.compute", "pyarrow.types"
absent = [n for n in reads_data if not importlib.util.find_spec(n.split(".")[0])]
sys.modules.update((name, MagicMock()) for name in absent)  # not used here
from trl.trainer.utils import add_fused_lm_head

for name in absent:
    del sys.modules[name]
VOCABULARY, RANKS = 32, 2
# True for TRL's fused head, and the FSDP2 unit beside layer and root
WAYS = {
    "the model's own loss, norm and head a unit": (False, "norm and head"),
    "the model's own loss, head a unit": (False, "head"),
    "fused, head in the root": (True, ""),
    "fused, norm and head a unit": (True, "norm and head"),
    "fused, head a unit": (True, "head"),
}


def problem(dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Return a Llama whose head is not tied, and tokens by rank."""
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **shape)
    return LlamaForCausalLM(config).to(dtype), torch.randint(VOCABULARY, (RANKS, 3, 6))


def rank_main(rank: int) -> dict[str, list[Tensor]]:
    """Return way -> gradients of the head and of a layer."""
    found = {}
    for way, (fused, units) in WAYS.items():
        model, tokens = problem(torch.float32)
        if fused:
            add_fused_lm_head(model)
        fully_shard(model.model.layers[0])
        if units:
            apart = [model.model.norm] if units == "norm and head" else []
            fully_shard([*apart, model.lm_head])
        fully_shard(model)
        given = {"fused_lm_head": True} if fused else {}
        model(input_ids=tokens[rank], labels=tokens[rank], **given).loss.backward()
        layer = model.model.layers[0].mlp.up_proj
        found[way] = [p.weight.grad.full_tensor() for p in (model.lm_head, layer)]
    return found


def reference(dtype: torch.dtype) -> list[Tensor]:
    """Return both gradients from one process: the mean over all rows."""
    model, tokens = problem(dtype)
    rows = tokens.flatten(0, 1)
    model(input_ids=rows, labels=rows).loss.backward()
    return [model.lm_head.weight.grad, model.model.layers[0].mlp.up_proj.weight.grad]


if __name__ == "__main__":
    ranks, (head, layer) = on_ranks(rank_main, ranks=RANKS), reference(torch.float64)
    for way in WAYS:
        of_head, of_layer = ranks[0][way]
        wrong = off(of_head, head)
        print(f"{way}: head off by {wrong:.1e}, layer by {off(of_layer, layer):.1e}")
    noise = off(reference(torch.float32)[0], head)
    tell(
        not wrong < 1e-3,
        "trl",
        parameter="lm_head.weight",
        relative_error=f"{wrong:.2e}",
        reference=f"one process, fp64; fp32 is off by {noise:.0e}",
    )
