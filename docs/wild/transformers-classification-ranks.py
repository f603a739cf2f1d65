"""transformers: `Trainer` trains sequence classifiers with a gradient times the ranks.

python transformers-classification-ranks.py; exit code 1 where the bug shows.
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
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification
from transformers import Trainer, TrainerCallback, TrainingArguments

ROWS, RANKS, HEAD = 8, 2, "score.weight"
# ranks, micro-batches of a step on each, average_tokens_across_devices
WAYS = {
    "1 rank": (1, 1, True),
    "1 rank, 2 micro-batches": (1, 2, True),
    "2 ranks": (2, 1, True),
    "2 ranks, 2 micro-batches": (2, 2, True),
    "2 ranks, average_tokens_across_devices=False": (2, 1, False),
}


def problem(dtype: torch.dtype) -> tuple[Any, list[dict[str, Any]]]:
    """Return a Llama that classifies sequences, and rows of equal length."""
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    shape |= {"vocab_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(num_labels=3, pad_token_id=0, **shape)
    tokens = torch.randint(1, 32, (ROWS, 6)).tolist()
    rows = [{"input_ids": row, "labels": n % 3} for n, row in enumerate(tokens)]
    return LlamaForSequenceClassification(config).to(dtype), rows


class Keeps(TrainerCallback):
    """Callback that keeps the head's gradient when the optimizer steps."""

    gradient: Tensor | None = None

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        """Keep the gradient; the Trainer calls this."""
        self.gradient = model.get_parameter(HEAD).grad.clone()


def rank_main(_: int, ranks: int, parts: int, averages: bool) -> Tensor | None:
    """Return the gradient that the optimizer gets in one step over all rows."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, not used
    model, rows = problem(torch.float32)
    keeps, rows_of_part = Keeps(), ROWS // ranks // parts
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=1, max_grad_norm=0.0, save_strategy="no",
            per_device_train_batch_size=rows_of_part, gradient_accumulation_steps=parts,
            average_tokens_across_devices=averages, **quiet,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows, callbacks=[keeps]).train()
    return keeps.gradient


if __name__ == "__main__":
    model, rows = problem(torch.float64)
    labels = torch.tensor([row["labels"] for row in rows])
    tokens = torch.tensor([row["input_ids"] for row in rows])
    model(input_ids=tokens, labels=labels).loss.backward()
    exact = model.get_parameter(HEAD).grad
    wrong = {}
    for way, (ranks, parts, averages) in WAYS.items():
        found = on_ranks(rank_main, ranks, parts, averages, ranks=ranks)[0]
        times = float((found.double() * exact).sum() / exact.square().sum())
        wrong[way] = off(found, exact)
        print(f"{way}: {times:.3f} times the gradient, off by {wrong[way]:.1e}")
    tell(
        not wrong["2 ranks"] < 1e-3,
        "transformers",
        parameter=HEAD,
        relative_error=f"{wrong['2 ranks']:.2e}",
        reference=f"one process, fp64; fp32 is off by {wrong['1 rank']:.0e}",
    )
