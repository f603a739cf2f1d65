"""weights loaded wrong under the tp plan.

Needs torch and transformers alone: random weights, no download. Exits 1 while it shows.
Made by gradparity's survey on 2026-11-23: transformers 5.23.0, torch 2.13.0+cpu.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.distributed import DistributedConfig
from transformers.models.hrm_text.configuration_hrm_text import HrmTextConfig
from transformers.models.hrm_text.modeling_hrm_text import HrmTextForCausalLM

CONFIG = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64,
    "head_dim": 8, "use_cache": False}
PLAN = DistributedConfig(tp_size=2)
PARAMETER = "model.H_module.layers.0.self_attn.k_proj.weight"
torch.manual_seed(0)
tokens = torch.randint(24, 64, (8, 9))


def seen(model, whole=lambda parameter: parameter):
    """The parameter, and what the model makes of the tokens."""
    with torch.no_grad():
        parameter = whole(model.get_parameter(PARAMETER)).detach().clone()
        return parameter, model(input_ids=tokens[:, :-1]).logits


def run_rank(rank, folder):
    """Load the model under its plan."""
    dist.init_process_group("gloo", f"file://{folder}/s", rank=rank, world_size=2)
    model = HrmTextForCausalLM.from_pretrained(folder, distributed_config=PLAN)
    found = seen(model, lambda parameter: parameter.full_tensor())
    torch.save(found, f"{folder}/{rank}.pt")


def main():
    """Print the errors of weight and output."""
    torch.set_num_threads(1)  # threads do not survive a fork
    model = HrmTextForCausalLM(HrmTextConfig(**CONFIG)).eval()
    for p in model.parameters():  # no zeros and ones, which hide errors
        drawn = torch.randn(p.shape)
        p.data = p + 0.1 * drawn if p.ndim < 2 else drawn / p.shape[-1] ** 0.5
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = HrmTextForCausalLM.from_pretrained(folder)  # on one process all is well
        assert all(map(torch.equal, model.parameters(), again.parameters()))
        mp.start_processes(run_rank, (folder,), 2, start_method="fork")
        found = torch.load(f"{folder}/0.pt")
        errors = [(f - t).norm() / t.norm() for f, t in zip(found, seen(model))]
        print(f"{PARAMETER}: relative error {errors[0]:.2g}")
        print(f"output of the model: relative error {errors[1]:.2g}")
    return int(min(errors) > 0.01)


if __name__ == "__main__":
    sys.exit(main())
