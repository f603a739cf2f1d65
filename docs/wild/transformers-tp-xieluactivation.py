"""gradient of act_fn.alpha_p wrong under the tp plan.

Needs torch and transformers alone: random weights, no download. Exits 1 while it shows.
Made by gradparity's survey on 2026-11-23: transformers 5.23.0, torch 2.13.0+cpu.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy
from transformers.distributed import DistributedConfig
from transformers.models.apertus.configuration_apertus import ApertusConfig
from transformers.models.apertus.modeling_apertus import ApertusForCausalLM

CONFIG = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "use_cache": False}
PLAN = DistributedConfig(tp_size=2)
PARAMETER = "model.layers.0.mlp.act_fn.alpha_p"
ROWS = torch.randint(24, 64, (8, 9), generator=torch.manual_seed(0))


def gradient(model, rows):
    """Of the mean over all rows, accumulated over the micro-batches."""
    for tokens in rows.chunk(1):
        output = model(input_ids=tokens[:, :-1]).logits.flatten(0, -2)
        targets = tokens[:, 1:].flatten() % output.shape[-1]
        (cross_entropy(output, targets) * len(tokens) / len(rows)).backward()
    found = model.get_parameter(PARAMETER).grad
    model.zero_grad()
    return getattr(found, "full_tensor", found.clone)()  # where it is a DTensor


def run_rank(rank, folder):
    """Load the model under its plan, and take the gradient."""
    dist.init_process_group("gloo", f"file://{folder}/s", rank=rank, world_size=2)
    for dtype in (torch.float32, torch.float64):
        load = ApertusForCausalLM.from_pretrained
        model = load(folder, dtype=dtype, distributed_config=PLAN)
        found = gradient(model, ROWS)
        torch.save(found, f"{folder}/{dtype}-{rank}.pt")


def main():
    """Print the gradient's error in fp32 and in fp64."""
    torch.set_num_threads(1)  # threads do not survive a fork
    model = ApertusForCausalLM(ApertusConfig(**CONFIG)).eval()
    for p in model.parameters():  # no zeros and ones, which hide errors
        drawn = torch.randn(p.shape)
        p.data = p + 0.1 * drawn if p.ndim < 2 else drawn / p.shape[-1] ** 0.5
    shows = True
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        mp.start_processes(run_rank, (folder,), 2, start_method="fork")
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            true, again = gradient(model, ROWS), gradient(model, ROWS.flip(0))
            found = torch.load(f"{folder}/{dtype}-0.pt")
            error, noise = ((x - true).norm() / true.norm() for x in (found, again))
            print(f"{PARAMETER}, {dtype}: relative error {error:.2g}, rounding "
                  f"{noise:.1g}; norm {found.norm():.4g}, true {true.norm():.4g}")
            shows &= bool(error > 8 * max(noise, torch.finfo(torch.float32).eps))
    return int(shows)


if __name__ == "__main__":
    sys.exit(main())
