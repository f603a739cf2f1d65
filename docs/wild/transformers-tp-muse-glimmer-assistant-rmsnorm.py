"""gradient of k_norm.weight wrong under the tp plan.

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
from torch.nn.functional import cross_entropy
from transformers.distributed import DistributedConfig
from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

CONFIG = {"num_hidden_layers": 2, "layer_types": ["full_attention", "full_attention"],
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "sliding_window": 4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "block_size": 4, "mask_token_id": 3, "target_layer_ids": [0, 1]}
PLAN = DistributedConfig(tp_size=2)
PARAMETER = "layers.0.self_attn.k_norm.weight"
ROWS = torch.randint(24, 64, (8, 9), generator=torch.manual_seed(0))


def drawn_model():
    """Return a model with random weights: zeros and ones would hide errors."""
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**CONFIG)).eval()
    for p in model.parameters():
        drawn = torch.randn(p.shape)
        p.data = p + 0.1 * drawn if p.ndim < 2 else drawn / p.shape[-1] ** 0.5
    return model


def gradient(model, rows):
    """Return the parameter's gradient, accumulated over the micro-batches."""
    for tokens in rows.chunk(1):
        output = model(noise_embeds=torch.sin(
            tokens[:, :-1, None] * torch.arange(1.0, 33)
        ).to(model.dtype), context_hidden_states=torch.sin(
            tokens[:, :4, None] * torch.arange(1.0, 65)
        ).to(model.dtype)).last_hidden_state
        output = output.flatten(0, -2)
        targets = tokens[:, 1:].flatten() % output.shape[-1]
        (cross_entropy(output, targets) * len(tokens) / len(rows)).backward()
    found = model.get_parameter(PARAMETER).grad
    model.zero_grad()
    return getattr(found, "full_tensor", found.clone)()  # where it is a DTensor


def rank_main(rank, folder):
    """Load the model under its plan; return gradients in fp32 and fp64."""
    load = MuseGlimmerAssistantModel.from_pretrained
    models = (load(folder, dtype=d, distributed_config=PLAN) for d in DTYPES)
    return [gradient(model, ROWS) for model in models]


DTYPES = torch.float32, torch.float64  # rounding in fp32 is no error in fp64 either
if __name__ == "__main__":
    model = drawn_model()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        gradients = on_ranks(rank_main, folder, ranks=2)[0]
    shows = True
    for dtype, found in zip(DTYPES, gradients):
        model.to(dtype)
        exact = gradient(model, ROWS)
        error, noise = off(found, exact), off(gradient(model, ROWS.flip(0)), exact)
        print(f"{dtype}: off by {error:.2g}, rounding {noise:.1g}; norm "
              f"{found.norm():.4g}, should be {exact.norm():.4g}")
        shows &= not error < 8 * max(noise, torch.finfo(torch.float32).eps)
    tell(
        shows,
        "transformers",
        parameter=PARAMETER,
        relative_error=f"{error:.2g}",
        reference="the same model on one process in fp64",
    )
