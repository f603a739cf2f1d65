"""weights loaded wrong under the tp plan.

Random weights, no download; exit code 1 where the bug shows.
Made by gradparity's survey on 2026-11-26: transformers 5.23.0, torch 2.13.0+cpu.
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
from transformers.distributed import DistributedConfig
from transformers.models.hrm_text.configuration_hrm_text import HrmTextConfig
from transformers.models.hrm_text.modeling_hrm_text import HrmTextForCausalLM

CONFIG = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64,
    "head_dim": 8, "use_cache": False}
PLAN = DistributedConfig(tp_size=2)
PARAMETER = "model.H_module.layers.0.self_attn.k_proj.weight"
ROWS = torch.randint(24, 64, (8, 9), generator=torch.manual_seed(0))


def drawn_model():
    """Return a model with random weights: zeros and ones would hide errors."""
    model = HrmTextForCausalLM(HrmTextConfig(**CONFIG)).eval()
    for p in model.parameters():
        drawn = torch.randn(p.shape)
        p.data = p + 0.1 * drawn if p.ndim < 2 else drawn / p.shape[-1] ** 0.5
    return model


def seen(model, tokens=ROWS):
    """Return the whole parameter, and the output of the model."""
    with torch.no_grad():
        parameter = model.get_parameter(PARAMETER).detach()
        whole = getattr(parameter, "full_tensor", parameter.clone)()
        return whole, model(input_ids=tokens[:, :-1]).logits


def rank_main(rank, folder):
    """Load the model under its plan; return its parameter and output."""
    return seen(HrmTextForCausalLM.from_pretrained(folder, distributed_config=PLAN))


if __name__ == "__main__":
    model = drawn_model()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = HrmTextForCausalLM.from_pretrained(folder)  # on one process all is well
        assert all(map(torch.equal, model.parameters(), again.parameters()))
        found = on_ranks(rank_main, folder, ranks=2)[0]
    weight, output = map(off, found, seen(model))
    print(f"the output of the model is off by {output:.2g}")
    tell(
        not (weight < 0.01 or output < 0.01),
        "transformers",
        parameter=PARAMETER,
        relative_error=f"{weight:.2g}",
        reference="what was saved, which loads right on one process",
    )
