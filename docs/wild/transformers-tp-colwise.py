"""gradient of experts.gate_up_proj wrong under the tp plan.

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
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingForCausalLM

CONFIG = {"num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["sparse", "sparse"], "vocab_size": 64, "hidden_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
    "sliding_window_size": 4, "d_rel": 8, "rel_extent": 4, "max_position_embeddings":
    64, "intermediate_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "bos_token_id": 0, "eos_token_id":
    1}
PLAN = DistributedConfig(tp_size=2, tp_plan=dict.fromkeys(["model.embed_tokens",
    "model.layers.*.mlp.shared_experts", "model.layers.*.mlp.shared_experts.gate_proj",
    "model.layers.*.mlp.shared_experts.up_proj",
    "model.layers.*.mlp.shared_experts.down_proj"], "replicate"))
PARAMETER = "model.layers.0.mlp.experts.gate_up_proj"
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
        load = InklingForCausalLM.from_pretrained
        model = load(folder, dtype=dtype, distributed_config=PLAN)
        model.set_experts_implementation("eager")  # grouped ones take no fp64
        found = gradient(model, ROWS)
        torch.save(found, f"{folder}/{dtype}-{rank}.pt")


def main():
    """Print the gradient's error in fp32 and in fp64."""
    torch.set_num_threads(1)  # threads do not survive a fork
    model = InklingForCausalLM(InklingTextConfig(**CONFIG)).eval()
    for p in model.parameters():  # no zeros and ones, which hide errors
        drawn = torch.randn(p.shape)
        p.data = p + 0.1 * drawn if p.ndim < 2 else drawn / p.shape[-1] ** 0.5
    shows = True
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        mp.start_processes(run_rank, (folder,), 2, start_method="fork")
        for dtype in (torch.float32, torch.float64):
            model.set_experts_implementation("eager")  # grouped ones take no fp64
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
