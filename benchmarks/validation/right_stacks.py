"""Right training setups, all of which must pass, whatever the seed.

    gradparity bench right-stacks

They are the workloads of the examples, the fixed version of each specimen, setups that
were once false positives, and the right scalers. Each runs in all scenarios of
``--quick``, with weights and batches of several seeds. Exit code 1: one failed or
broke. What cannot run, for example because a package is missing, is named and counted,
and is not a pass.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gradparity.benchmarks.tables import row, write_between
from gradparity.benchmarks.validation.specimens import TIMEOUT_S, Right, checked_right
from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.files import write_whole
from gradparity.conformance.rank.devices import Devices
from gradparity.conformance.run.launcher import Pool
from gradparity.conformance.run.recorder import make_header
from gradparity.conformance.status import UsageError
from gradparity.fixtures.faulty import RIGHT
from gradparity.fixtures.specimens import ONE_RANK, SPECIMENS

RESULTS = Path(__file__).parents[1] / "results" / "right_stacks.json"
PAGE = Path(__file__).parents[2] / "docs" / "first-verdicts.md"
SEEDS = 5

EXAMPLES = (
    "gan:Gan",
    "qwen3:Stack",
    "workload:Stack",
    "stacks.accelerate_fsdp2:Stack",
    "stacks.deepspeed_bf16:Zero2",
    "stacks.deepspeed_pipe:Stack",
    "stacks.deepspeed_stages:Zero2",
    "stacks.deepspeed_stages:Owned1",
    "stacks.deepspeed_stages:Owned2",
    "stacks.deepspeed_stages:Zero3",
    "stacks.deepspeed_zero:Zero1",
    "stacks.diffusers_flux:Ulysses",
    "stacks.fairscale_sharded:Stack",
    "stacks.hf_trainer:Stack",
    "stacks.lightning_model_parallel:Stack",
    "stacks.megatron_fsdp_stages:Zero1",
    "stacks.megatron_fsdp_stages:Zero2",
    "stacks.megatron_fsdp_zero3:Zero3",
    "stacks.megatron_gpt:Stack",
    "stacks.nemo_automodel_qwen3:Stack",
    "stacks.olmo_core_axes:Hybrid",
    "stacks.olmo_core_axes:Tensor",
    "stacks.olmo_core_axes:Ulysses",
    "stacks.olmo_core_llama:Fsdp",
    "stacks.peft_adapters:Lora",
    "stacks.peft_adapters:Dora",
    "stacks.peft_adapters:ModulesToSave",
    "stacks.peft_adapters:Ia3",
    "stacks.peft_plan:PlanLora",
    "stacks.ring_attention:NoRing",
    "stacks.torch_compiled_fsdp2:Layers",
    "stacks.torch_compiled_fsdp2:Whole",
    "stacks.torch_ddp_hooks:Fp16",
    "stacks.torch_ddp_hooks:Plain",
    "stacks.torch_fsdp1:Full",
    "stacks.torch_fsdp1:GradientsAndStates",
    "stacks.torch_fsdp1:Hybrid",
    "stacks.torch_fsdp1_flat:Flat",
    "stacks.torch_fsdp1_no_shard:NoShard",
    "stacks.torch_hsdp_all_reduce:EachUsed",
    "stacks.torch_interleaved:LoopedBfs",
    "stacks.torch_interleaved:Interleaved",
    "stacks.torch_pipeline:GPipe",
    "stacks.torch_pipeline_calls:OneForwardOneBackward",
    "stacks.torch_pipeline_dp:Replicated",
    "stacks.torch_pipeline_dp:Sharded",
    "stacks.torch_pipeline_dp:ShardedZeroBubble",
    "stacks.torch_pipelines:InterleavedZeroBubble",
    "stacks.torch_pipelines:ZeroBubbleV",
    "stacks.torch_pipelines:DualPipeV",
    "stacks.torch_zero_redundancy:Buckets",
    "stacks.torch_zero_redundancy:Stack",
    "stacks.torchao_float8:Float8AllGather",
    "stacks.torchao_float8:Rowwise",
    "stacks.torchao_float8:Tensorwise",
    "stacks.torchao_float8_tp:Stack",
    "stacks.torchao_int8:Stack",
    "stacks.torchao_int8_tp:Stack",
    "stacks.torchao_optimizers:Eight",
    "stacks.torchao_optimizers:Four",
    "stacks.torchao_optimizers:Fp8",
    "stacks.torchao_optimizers:Replicated",
    "stacks.torchao_optimizers_saved:Eight",
    "stacks.torchao_optimizers_saved:Four",
    "stacks.torchtitan_debug:Stack",
    "stacks.trl_grpo:Grpo",
    "stacks.trl_sft:Sft",
    "stacks.vector_quantize_lfq:SampleEntropy",
)
"""Right entries of ``examples``. ``docs/stacks.md`` lists wrong ones, such as
``PlanModulesToSave``, ``ReplicatedGPipe`` and ``FrozenStage``."""

ONCE_FAILED = {
    "workloads.stacks": (
        "Right",
        "Nested",
        "ExpertsSeeTheSameRows",
        "ZeroBiases",
    ),
    "workloads.random_stacks": (
        "Dropout",
        "SeedsInBatch",
        "OwnStep",
        "SequenceParallel",
        "DropsDTensors",
        "Recomputes",
        "RecomputesReentrant",
        "RestoresItsOwnGenerator",
        "NoisyAttention",
        "DropsLayers",
    ),
    "workloads.routed_stacks": ("TopOne", "TopTwo", "ByMaximum", "Recomputed"),
    "workloads.misplaced": (
        "RightSequence",
        "RightSharded",
        "RightPipeline",
        "RightContext",
    ),
    "conformance.test_bias_corrections": (
        "InFp32",
        "Compiled",
        "CompiledAdam",
        "CompiledAdamax",
        "CompiledNAdam",
    ),
    "conformance.test_one_rank": ("ReducesInBf16",),
    "conformance.test_own_skips": ("SkipsSpikes", "AsksOneRank"),
    "conformance.test_own_steps": (
        "MakesParametersAnew",
        "StepsShards",
        "HasAnEmptyParameter",
    ),
    "workloads.schedules": (
        "WarmsUp",
        "Cosine",
        "OnTwoAxes",
        "Piped",
        "OneCycle",
        "CyclesMomentum",
        "CyclesBetas",
        "TwoRates",
        "BeganElsewhere",
        "OfCopies",
    ),
    "conformance.test_workload_forms": (
        "Replicated",
        "Weighted",
        "BatchNormInParts",
        "KeepsTensors",
        "Forces",
        "CountedForces",
        "Prepares",
        "StaticGraph",
        "TableWithItsOwnOptimizer",
        "FindsItsRate",
        "Sharded",
        "Functional",
    ),
    "conformance.test_workload_muon": ("Matrices",),
    "conformance.test_workload_names": ("NamedLikeWrappers",),
    "conformance.test_workload_parts": (
        "Counted",
        "CountedSharded",
        "CountedByHooks",
        "MixesTokens",
        "Cuts",
        "Packs",
        "UsesHalf",
        "UsesHalfSharded",
    ),
    "workloads.steps": (
        "Trains",
        "TrainsSharded",
        "TrainsOnTwoAxes",
        "Renames",
        "TrainsAModule",
        "Averages",
        "TwoOptimizers",
        "FlatShards",
        "TakesTurns",
        "ClipsInTurns",
        "EvaluatesAgain",
        "ReducesToOwners",
        "Pipeline",
    ),
}
"""Module in ``tests`` -> its right stacks that a check once failed, or that are right
in an unusual way. The stacks' docstrings describe them."""


_NEVER = "the package never averages there (docs/wild/torch-fsdp1-hybrid-one.md)"
_DROPS = "the package trains on the last micro-batch alone (docs/stacks.md)"
_WHOLE = "its train_step takes one micro-batch"
_EVEN = "its parts have equal numbers of rows"
_SEVERAL = ("accumulate", "clip-norm", "recompute")
"""Recipes that hand over several micro-batches."""
NOT_TRIED: dict[str, tuple[tuple[str, ...], str]] = {
    "examples.qwen3:Stack": (("accumulate",), "the package is wrong (docs/stacks.md)"),
    "examples.stacks.deepspeed_zero:Zero1": (_SEVERAL, _DROPS),
    "examples.stacks.deepspeed_stages:Zero2": (_SEVERAL, _DROPS),
    "examples.stacks.torch_fsdp1:Hybrid": (("dp_replicate2-dp_shard1",), _NEVER),
    "gradparity.tests.workloads.misplaced:RightPipeline": (("accumulate",), _WHOLE),
    "gradparity.tests.workloads.random_stacks:SequenceParallel": (
        ("accumulate-uneven",),
        _EVEN,
    ),
    "gradparity.tests.workloads.schedules:Piped": (("accumulate-uneven",), _EVEN),
    "gradparity.tests.workloads.steps:Pipeline": (("accumulate-uneven",), _EVEN),
    "gradparity.tests.conformance.test_workload_forms:Functional": (
        ("accumulate",),
        _WHOLE,
    ),
    "gradparity.tests.conformance.test_workload_forms:TableWithItsOwnOptimizer": (
        ("accumulate",),
        _WHOLE,
    ),
    "gradparity.tests.conformance.test_own_steps:HasAnEmptyParameter": (
        ("dp2",),
        "it is made for one process",
    ),
}
"""Workload -> topologies, or beginnings of recipes, in which it cannot train or is
really wrong; and the reason."""


@dataclass(frozen=True)
class Found:
    """Verdicts on one entry."""

    failed: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    """Inconclusive cases: scenario, and the first check with its message."""
    largest: float = 0.0
    first_s: float = 0.0
    """Seconds from an empty pool of ranks to the first verdict."""
    not_run: str = ""


def corpus() -> dict[str, str]:
    """Return spec of a workload or scaler -> where it comes from."""
    found = {f"examples.{name}": "example" for name in EXAMPLES}
    found |= {
        pair.fixed: f"specimen {name}" for name, pair in (SPECIMENS | ONE_RANK).items()
    }
    for module, names in ONCE_FAILED.items():
        found |= {f"gradparity.tests.{module}:{name}": "once failed" for name in names}
    steps = f"gradparity.tests.{SCALED_STEPS}"
    found |= {f"{steps}:{s.__name__}": _SCALED_STEP for s in _scaled_steps().RIGHT}
    return found | {f"{s.__module__}:{s.__qualname__}": _SCALER for s in RIGHT}


SCALED_STEPS = "conformance.test_scaled_steps"
"""Module of the folder ``tests`` with steps that call a scaler in unusual forms."""


def _scaled_steps() -> Any:
    return import_module(f"gradparity.tests.{SCALED_STEPS}")


_SCALED_STEP = "once failed, with a scaler"
_SCALER = "right scaler"
_SCALED = (
    "ddp/2/fp32/sgd/none/steps=5",
    "fsdp/2/fp32/adamw/inf@r1s1:up.weight;nan@r0s3:last/steps=5",
    "fsdp/4/fp32/sgd/inf@r3s1:up.weight/steps=2",
    "pp/2/fp32/sgd/none/model=text,steps=2",
    "fsdp/2/fp16-params/adamw/none/steps=5,scale=1048576",
)
"""Scenarios for scalers: replicas, shards, stages, bad gradients and overflows."""


def checked(spec: str, source: str, seeds: int) -> Found:
    """Run the checks on one entry of the corpus, for all seeds.

    Args:
        spec: spec of the workload or of the scaler.
        source: where it comes from, a value of :func:`corpus`.
        seeds: number of seeds, which begin at 0.
    """
    found, start, first_s = Right(), time.monotonic(), 0.0
    not_tried, _ = NOT_TRIED.get(spec, ((), ""))
    with Runner(folder=".", timeout_s=TIMEOUT_S) as runner:
        try:
            for seed in range(seeds):
                for case in (
                    _checked_scaler(runner, spec, seed)
                    if source == _SCALER
                    else _checked_scaled_step(runner, spec, seed)
                    if source == _SCALED_STEP
                    else checked_right(runner, spec, seed, not_tried)
                ):
                    found.add(case)
                    first_s = first_s or time.monotonic() - start
        except UsageError as error:
            return Found(not_run=str(error))
    return Found(
        failed=tuple(found.failed),
        undecided=tuple(found.undecided),
        largest=round(found.largest, 3),
        first_s=round(first_s, 1),
    )


def _checked_scaler(runner: Runner, spec: str, seed: int) -> Iterator[Case]:
    for text in _SCALED:
        yield runner.run(spec, Scenario.parse(f"{text},seed={seed}"))


def _checked_scaled_step(runner: Runner, spec: str, seed: int) -> Iterator[Case]:
    """Yield cases with planted faults and with overflows, with our scaler."""
    steps = _scaled_steps()
    where = {each.__name__: where for each, where in steps.RIGHT.items()}
    settings = f"model={spec},steps=4,interval=2,seed={seed}"
    plans = [(faults, settings) for faults in steps.FAULTS]
    for faults, more in [*plans, ("none", f"{settings},{steps.OVERFLOWS}")]:
        text = f"{where[spec.partition(':')[2]]}/fp32/own/{faults}/{more}"
        yield runner.run(steps.OURS, Scenario.parse(text))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the corpus and print one line for each entry."""
    parser = argparse.ArgumentParser(prog="right-stacks", description=__doc__)
    parser.add_argument("--only", default="", help="entries with this text in them")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="entries run at once")
    parser.add_argument("--record", action="store_true", help="write the results")
    parser.add_argument("--list", action="store_true", help="only list the corpus")
    given = parser.parse_args(argv)
    entries = {
        spec: source
        for spec, source in corpus().items()
        if given.only in f"{spec} {source}"
    }
    if given.list:
        print(*(f"{spec}  ({source})" for spec, source in entries.items()), sep="\n")
        return 0
    if not entries:
        parser.error(f"no entry has {given.only!r} in it")
    found: dict[str, Found] = {}
    # `gradparity run` starts a new process; so does each entry here
    context = get_context("spawn")
    with ProcessPoolExecutor(given.jobs, context, max_tasks_per_child=1) as workers:
        futures = {
            spec: workers.submit(checked, spec, source, given.seeds)
            for spec, source in entries.items()
        }
        for spec, future in futures.items():
            found[spec] = future.result()
            told = found[spec].not_run and f"not run: {found[spec].not_run}"
            largest = f"largest error {found[spec].largest:.2f} of its bound"
            told = told or f"{json.dumps(found[spec].failed)}, {largest}"
            if spec in NOT_TRIED:
                names, why = NOT_TRIED[spec]
                told += f" (not tried: {', '.join(names)}; {why})"
            print(f"{spec}: {told}", flush=True)
            for text in found[spec].undecided:
                print(f"  undecided: {text}", flush=True)
    if given.record:
        write_record(given.seeds, given.jobs, found)
    wrong = sum(bool(each.failed) for each in found.values())
    left = sum(bool(each.not_run) for each in found.values())
    print(
        f"{wrong} of {len(found) - left} right setups failed over {given.seeds} seeds"
        + (f"; {left} could not be run" if left else "")
        + f"; {sum(bool(each.undecided) for each in found.values())} were undecided "
        "somewhere"
    )
    return 1 if wrong or left == len(found) else 0


def first_verdicts(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of the time to each example's first verdict, by file."""
    files: dict[str, list[str]] = defaultdict(list)
    for spec, entry in entries.items():
        if spec.startswith("examples.") and not entry["not_run"]:
            module, _, name = spec.removeprefix("examples.").partition(":")
            files[module].append(f"`{name}` {entry['first_s']:.0f} s")
    rows = [row(f"`{module}`", ", ".join(found)) for module, found in files.items()]
    return "\n".join([row("file", "first verdict"), row("---", "---"), *rows])


def write_record(seeds: int, jobs: int, found: dict[str, Found]) -> None:
    """Record the results; entries that were not run keep their earlier record."""
    header = make_header(
        planned=0,
        preset="quick",
        seed=0,
        arguments=["bench", "right-stacks"],
        place=Pool(Devices(), timeout_s=TIMEOUT_S),
    )
    known = json.loads(RESULTS.read_text())["entries"] if RESULTS.exists() else {}
    made = {"commit": header.commit, "started": header.started, "seeds": seeds}
    known |= {spec: asdict(each) | made for spec, each in found.items()}
    entries = {spec: known[spec] for spec in corpus() if spec in known}
    record = {
        "torch": header.torch,
        "platform": header.platform,
        "cores": os.cpu_count(),
        "jobs": jobs,
        "entries": entries,
        "not_tried": {s: NOT_TRIED[s] for s in entries if s in NOT_TRIED},
    }
    write_whole(RESULTS, json.dumps(record, indent=1) + "\n")
    write_page(record)


def write_page(record: Mapping[str, Any]) -> None:
    """Write the table of a record into its page."""
    entries = record["entries"]
    commits = dict.fromkeys(entry["commit"][:7] for entry in entries.values())
    last = max(entry["started"] for entry in entries.values())
    made = (
        f"gradparity at {', '.join(commits)}, torch {record['torch']}, "
        f"{record['cores']} cores, {record['jobs']} stacks at once, {last[:10]}"
    )
    write_between(PAGE, {"made": made, "verdicts": first_verdicts(entries)})


if __name__ == "__main__":
    sys.exit(main())
