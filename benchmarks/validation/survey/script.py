"""The script of a finding: one parameter's gradient on one process and under the plan.

It needs only torch and transformers, for the package's maintainers, and has the frame
of all scripts in docs/wild. Many models compute norms or rotary positions in fp32 for
any dtype, so an error that fp32 rounding explains does not count in fp64 either. A
weight that is loaded wrong is shown in fp32 only, because loading rounds nothing.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from gradparity.benchmarks.validation.survey.catalogue import PLANS
from gradparity.benchmarks.validation.survey.records import LOADED, ODD_HEADS
from gradparity.benchmarks.validation.survey.templating import filled
from gradparity.benchmarks.validation.survey.tiny import FIRST_TOKEN, VOCAB
from gradparity.benchmarks.validation.wild import frame

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
"""Name of a run -> number of micro-batches in its script."""

WIDTH = 88


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
    """Return the text of a script.

    Args:
        title: one sentence on what it shows.
        date: date of the survey.
        versions: versions of transformers and torch.
        plan: a key of ``PLANS``.
        replaced: rules that replace the plan's own.
        run: name of the run that fails.
        parameter: name of the wrong parameter in the model.
        config: class of the configuration.
        model: class of the model.
        settings: arguments of the configuration.
        inputs: argument of the model -> expression in ``tokens``.
        output: attribute of what the model returns.
        misloads: true if it shows weights and outputs in fp32, and no gradient.
    """
    mesh = PLANS[plan].mesh
    shares = mesh.get("dp", 1)
    ranks = math.prod(mesh.values())
    pairs = [
        f'"{name}": {value!r}'.replace("'", '"') for name, value in settings.items()
    ]
    sizes = [f"{name}={size}" for name, size in PLANS[plan].sizes.items()]
    if replaced:
        names = ", ".join(f'"{name}"' for name in replaced)
        sizes.append(f'tp_plan=dict.fromkeys([{names}], "replicate")')
    return filled(
        "script.py.j2",
        title=title,
        date=date,
        versions=versions,
        frame=frame(),
        misloads=misloads,
        config_module=config.__module__,
        config=config.__name__,
        model_module=model.__module__,
        model=model.__name__,
        settings=_wrapped("{", pairs, "}", len("CONFIG = ")),
        sizes=_wrapped("DistributedConfig(", sizes, ")", len("PLAN = ")),
        parameter=parameter,
        first=FIRST_TOKEN,
        vocab=VOCAB,
        micro_batches=MICRO_BATCHES[run],
        sync_last=run == SYNC_LAST,
        inputs=", ".join(f"{name}={text}" for name, text in inputs.items()),
        output=output,
        ranks=ranks,
        share=f".chunk({shares})[rank // {ranks // shares}]" if shares > 1 else "",
        # torch's grouped products take no fp64
        eager=any("expert" in name for name in settings),
    )


def _wrapped(opening: str, items: Sequence[str], closing: str, taken: int) -> str:
    """Return a literal or call as wrapped source, after ``taken`` characters."""
    text = textwrap.fill(
        opening + ", ".join(items) + closing,
        width=WIDTH,
        initial_indent=" " * taken,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return text[taken:]
