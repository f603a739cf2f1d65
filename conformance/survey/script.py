"""The script of a finding: one parameter's gradient on one process and under the plan.

It needs only torch and transformers, for the package's maintainers. Many models compute
norms or rotary positions in fp32 for any dtype, so an error that fp32 rounding explains
is no error in fp64 either. A weight that is loaded wrong is shown in fp32 alone, as
loading rounds nothing.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .catalogue import PLANS
from .records import LOADED, ODD_HEADS
from .tiny import FIRST_TOKEN, VOCAB

__all__ = ["MICRO_BATCHES", "script_of"]

SYNC_LAST = "2 micro-batches, synchronised in the last"
MICRO_BATCHES = {
    LOADED: 1,
    "1 micro-batch": 1,
    "1 micro-batch, clipped": 1,
    "2 equal micro-batches": 2,
    SYNC_LAST: 2,
    "3 unequal micro-batches": 3,
    ODD_HEADS: 1,
}
"""Name of a run -> how many the script takes."""

WIDTH = 88

_TEMPLATE = '''\
"""{title}.

Needs torch and transformers alone: random weights, no download. Exits 1 while it shows.
Made by gradparity's survey on {date}: {versions}.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy
from transformers.distributed import DistributedConfig
from {config_module} import {config}
from {model_module} import {model}

CONFIG = {settings}
PLAN = {sizes}
PARAMETER = {parameter}
ROWS = torch.randint({first}, {vocab}, (8, 9), generator=torch.manual_seed(0))


def gradient(model, rows):
    """Of the mean over all rows, accumulated over the micro-batches."""
    for tokens in rows.chunk({parts}):
{sync}{forward}
        targets = tokens[:, 1:].flatten() % output.shape[-1]
        (cross_entropy(output, targets) * len(tokens) / len(rows)).backward()
    found = model.get_parameter(PARAMETER).grad
    model.zero_grad()
    return getattr(found, "full_tensor", found.clone)()  # where it is a DTensor


def run_rank(rank, folder):
    """Load the model under its plan, and take the gradient."""
    dist.init_process_group("gloo", f"file://{{folder}}/s", rank=rank, world_size={n})
    for dtype in (torch.float32, torch.float64):
        load = {model}.from_pretrained
        model = load(folder, dtype=dtype, distributed_config=PLAN)
{eager}        found = gradient(model, ROWS{share})
        torch.save(found, f"{{folder}}/{{dtype}}-{{rank}}.pt")


def main():
    """Print the gradient's error in fp32 and in fp64."""
    torch.set_num_threads(1)  # threads do not survive a fork
    model = {model}({config}(**CONFIG)).eval()
    for p in model.parameters():  # no zeros and ones, which hide errors
        drawn = torch.randn(p.shape)
        p.data = p + 0.1 * drawn if p.ndim < 2 else drawn / p.shape[-1] ** 0.5
    shows = True
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        mp.start_processes(run_rank, (folder,), {n}, start_method="fork")
        for dtype in (torch.float32, torch.float64):
{eager_too}            model.to(dtype)
            true, again = gradient(model, ROWS), gradient(model, ROWS.flip(0))
            found = torch.load(f"{{folder}}/{{dtype}}-0.pt")
            error, noise = ((x - true).norm() / true.norm() for x in (found, again))
            print(f"{{PARAMETER}}, {{dtype}}: relative error {{error:.2g}}, rounding "
                  f"{{noise:.1g}}; norm {{found.norm():.4g}}, true {{true.norm():.4g}}")
            shows &= bool(error > 8 * max(noise, torch.finfo(torch.float32).eps))
    return int(shows)


if __name__ == "__main__":
    sys.exit(main())
'''

_LOADED = '''\
"""{title}.

Needs torch and transformers alone: random weights, no download. Exits 1 while it shows.
Made by gradparity's survey on {date}: {versions}.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.distributed import DistributedConfig
from {config_module} import {config}
from {model_module} import {model}

CONFIG = {settings}
PLAN = {sizes}
PARAMETER = {parameter}
torch.manual_seed(0)
tokens = torch.randint({first}, {vocab}, (8, 9))


def seen(model, whole=lambda parameter: parameter):
    """The parameter, and what the model makes of the tokens."""
    with torch.no_grad():
        parameter = whole(model.get_parameter(PARAMETER)).detach().clone()
        return parameter, model({inputs}).{output}


def run_rank(rank, folder):
    """Load the model under its plan."""
    dist.init_process_group("gloo", f"file://{{folder}}/s", rank=rank, world_size={n})
    model = {model}.from_pretrained(folder, distributed_config=PLAN)
    found = seen(model, lambda parameter: parameter.full_tensor())
    torch.save(found, f"{{folder}}/{{rank}}.pt")


def main():
    """Print the errors of weight and output."""
    torch.set_num_threads(1)  # threads do not survive a fork
    model = {model}({config}(**CONFIG)).eval()
    for p in model.parameters():  # no zeros and ones, which hide errors
        drawn = torch.randn(p.shape)
        p.data = p + 0.1 * drawn if p.ndim < 2 else drawn / p.shape[-1] ** 0.5
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = {model}.from_pretrained(folder)  # on one process all is well
        assert all(map(torch.equal, model.parameters(), again.parameters()))
        mp.start_processes(run_rank, (folder,), {n}, start_method="fork")
        found = torch.load(f"{{folder}}/0.pt")
        errors = [(f - t).norm() / t.norm() for f, t in zip(found, seen(model))]
        print(f"{{PARAMETER}}: relative error {{errors[0]:.2g}}")
        print(f"output of the model: relative error {{errors[1]:.2g}}")
    return int(min(errors) > 0.01)


if __name__ == "__main__":
    sys.exit(main())
'''

_SYNC = """\
        last = torch.equal(tokens, rows[-len(tokens) :])
        getattr(model, "set_requires_gradient_sync", bool)(last)  # of FSDP2
"""
_EAGER = 'model.set_experts_implementation("eager")  # grouped ones take no fp64\n'


def script_of(
    *,
    title: str,
    date: str,
    versions: str,
    plan: str,
    replaced: Mapping[str, str],
    run: str,
    parameter: str,
    config: Any,
    model: Any,
    settings: Mapping[str, Any],
    inputs: Mapping[str, str],
    output: str,
    misloads: bool = False,
) -> str:
    """The text of a script.

    Args:
        title: one sentence on what it shows.
        date: of the survey.
        versions: of transformers and torch.
        plan: a key of ``PLANS``.
        replaced: rules in the place of the plan's own.
        run: name of the run that fails.
        parameter: its name in the model.
        config: class of the configuration.
        model: class of the model.
        settings: arguments of the configuration.
        inputs: argument of the model -> expression in ``tokens``.
        output: attribute of what the model returns.
        misloads: whether it shows weights and outputs in fp32, and no gradient.
    """
    mesh = PLANS[plan].mesh
    shares = mesh.get("dp", 1)
    tp = math.prod(mesh.values()) // shares
    pairs = [
        f'"{name}": {value!r}'.replace("'", '"') for name, value in settings.items()
    ]
    experts = any("expert" in name for name in settings)
    sizes = [f"{name}={size}" for name, size in PLANS[plan].sizes.items()]
    if replaced:
        names = ", ".join(f'"{name}"' for name in replaced)
        sizes.append(f'tp_plan=dict.fromkeys([{names}], "replicate")')
    called = ", ".join(f"{name}={text}" for name, text in inputs.items())
    forward = f"        output = model({called}).{output}.flatten(0, -2)"
    # the inputs of some models are expressions of several lines
    if max(map(len, forward.splitlines())) > WIDTH:
        forward = forward.replace(".flatten", "\n        output = output.flatten")
    return (_LOADED if misloads else _TEMPLATE).format(
        title=title,
        date=date,
        versions=versions,
        config_module=config.__module__,
        config=config.__name__,
        model_module=model.__module__,
        model=model.__name__,
        settings=_filled("{", pairs, "}", len("CONFIG = ")),
        sizes=_filled("DistributedConfig(", sizes, ")", len("PLAN = ")),
        parts=MICRO_BATCHES[run],
        parameter=f'"{parameter}"',
        first=FIRST_TOKEN,
        vocab=VOCAB,
        inputs=called,
        sync=_SYNC if run == SYNC_LAST else "",
        forward=forward,
        output=output,
        n=math.prod(mesh.values()),
        share=f".chunk({shares})[rank // {tp}]" if shares > 1 else "",
        # torch's grouped products take no fp64
        eager=f"{8 * ' '}{_EAGER}" if experts else "",
        eager_too=f"{12 * ' '}{_EAGER}" if experts else "",
    )


def _filled(opening: str, items: Sequence[str], closing: str, taken: int) -> str:
    """A literal or call in few lines of source, after ``taken`` characters."""
    filled = textwrap.fill(
        opening + ", ".join(items) + closing,
        width=WIDTH,
        initial_indent=" " * taken,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled[taken:]
