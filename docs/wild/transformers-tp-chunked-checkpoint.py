"""A fused projection of a checkpoint is loaded wrong under the tp plan of hrm_text.

Needs torch and transformers alone: random weights, no download. Exits 1 while it shows.
Checkpoints of the model hold gate, q, k and v as one `gqkv_proj`. Under a plan each
rank takes its rows of the fused tensor, and only then cuts them into the four.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.distributed import DistributedConfig
from transformers.models.hrm_text.configuration_hrm_text import HrmTextConfig
from transformers.models.hrm_text.modeling_hrm_text import HrmTextForCausalLM

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64
}
LAYER = "model.L_module.layers.0."
PARAMETERS = [
    *(f"{LAYER}self_attn.{name}_proj.weight" for name in ("gate", "q", "k", "v", "o")),
    *(f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
]
torch.manual_seed(0)
ROWS = torch.randint(24, 64, (8, 8))


def run_rank(rank, folder):
    """Load the model under its plan; keep its weights and its logits."""
    dist.init_process_group("gloo", f"file://{folder}/s", rank=rank, world_size=2)
    plan = DistributedConfig(tp_size=2)
    for dtype in (torch.float32, torch.float64):
        model = HrmTextForCausalLM.from_pretrained(
            folder, dtype=dtype, distributed_config=plan
        )
        found = {n: model.get_parameter(n).full_tensor().detach() for n in PARAMETERS}
        with torch.no_grad():
            found["logits"] = model(input_ids=ROWS).logits
        if rank == 0:
            torch.save(found, f"{folder}/{dtype}.pt")
    dist.destroy_process_group()


def main():
    """Print the errors of weights and logits, in fp32 and in fp64."""
    torch.set_num_threads(1)  # threads do not survive a fork
    model = HrmTextForCausalLM(HrmTextConfig(**CONFIG)).eval()
    for p in model.parameters():
        p.data = torch.randn(p.shape) / p.shape[-1] ** 0.5 if p.ndim > 1 else p.data
    shows = True
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = HrmTextForCausalLM.from_pretrained(folder)  # on one process it is right
        assert all(map(torch.equal, model.parameters(), again.parameters()))
        mp.start_processes(run_rank, (folder,), 2, start_method="fork")
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            found = torch.load(f"{folder}/{dtype}.pt")
            true = {n: model.get_parameter(n) for n in PARAMETERS}
            with torch.no_grad():
                true["logits"] = model(input_ids=ROWS).logits
                errors = {n: (found[n] - t).norm() / t.norm() for n, t in true.items()}
            for name, error in errors.items():
                print(f"{name}, {dtype}: relative error {error:.2g}")
            shows &= bool(errors[f"{LAYER}self_attn.q_proj.weight"] > 0.1)
            shows &= bool(errors["logits"] > 0.01)
    return int(shows)


if __name__ == "__main__":
    sys.exit(main())
