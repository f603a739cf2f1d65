"""Other people's stacks as workloads: right ones pass, wrong ones fail by a law.

A finding here is an accusation of a released package. Each is shown again by a script
that needs only that package; where one no longer fails, the package has cured it.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradparity
from gradparity.conformance import Case, Runner, Scenario

ROOT = Path(gradparity.__file__).parent
STACKS = ROOT / "examples" / "stacks"
PACKAGES = {
    "accelerate_fsdp2": "accelerate",
    "deepspeed_bf16": "deepspeed",
    "deepspeed_pipe": "deepspeed",
    "deepspeed_stages": "deepspeed",
    "deepspeed_zero": "deepspeed",
    "hf_trainer": "transformers",
    "lightning_model_parallel": "pytorch_lightning",
    "megatron_gpt": "megatron",
    "peft_adapters": "peft",
    "peft_plan": "peft",
    "torch_interleaved": "torch",
    "torch_pipeline": "torch",
    "torch_pipeline_calls": "torch",
    "torch_pipeline_dp": "torch",
    "torch_pipelines": "torch",
    "torchao_float8": "torchao",
    "torchao_float8_tp": "torchao",
    "torchtitan_debug": "torchtitan",
}
# packages warn while they are imported, about themselves
pytestmark = pytest.mark.filterwarnings("ignore")
COMPARED = {"parity.gradient", "parity.update", "parity.loss"}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        with Runner(folder=str(ROOT), timeout_s=200) as made:
            yield made


def judged(runner: Runner, stack: str, place: str, recipe: str) -> Case:
    package = PACKAGES[stack.partition(":")[0]]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see docs/stacks.md")
    settings = f"model=examples.stacks.{stack},recipe={recipe},steps=3"
    scenario = Scenario.parse(f"{place}/own/none/{settings}")
    if stack.startswith("deepspeed_pipe"):  # leaves its groups in DeepSpeed's modules
        with Runner(folder=str(ROOT), timeout_s=200) as alone:
            return alone.run("none", scenario)
    return runner.run("none", scenario)


@pytest.mark.parametrize(
    ("stack", "place", "recipe"),
    [
        ("deepspeed_zero:Zero1", "dp2/2/fp32", "plain"),
        ("deepspeed_stages:Zero2", "dp2/2/fp32", "plain"),
        ("deepspeed_stages:Zero3", "dp2/2/fp32", "accumulate-uneven"),
        ("deepspeed_stages:Owned1", "dp2/2/fp32", "accumulate-uneven"),
        ("deepspeed_stages:Owned2", "dp2/2/fp32", "accumulate"),
        ("deepspeed_bf16:Zero2", "dp2/2/bf16-params", "accumulate-uneven"),
        ("deepspeed_bf16:Zero2", "dp2/2/bf16-params", "resume"),
        ("accelerate_fsdp2:Stack", "dp2/2/fp32", "accumulate-uneven"),
        ("accelerate_fsdp2:Stack", "dp2/2/bf16-autocast", "accumulate"),
        ("hf_trainer:Stack", "dp2/2/fp32", "accumulate-uneven"),
        ("lightning_model_parallel:Stack", "dp2-tp1/2/fp32", "accumulate-uneven"),
        ("lightning_model_parallel:Stack", "dp1-tp2/2/fp32", "accumulate"),
        ("megatron_gpt:Stack", "tp2/2/fp32", "accumulate"),
        ("torch_pipelines:ZeroBubbleV", "pp2/2/fp32", "plain"),
        ("torchao_float8:Float8AllGather", "dp2/2/fp32", "accumulate-uneven"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                ("torch_pipeline:GPipe", "pp2/2/fp32", "plain"),
                ("torch_pipeline_calls:OneForwardOneBackward", "pp2/2/fp32", "plain"),
                ("torch_interleaved:LoopedBfs", "pp2/2/fp32", "plain"),
                ("torch_interleaved:Interleaved", "pp2/2/fp32", "plain"),
                ("torch_pipelines:InterleavedZeroBubble", "pp2/2/fp32", "plain"),
                ("torch_pipelines:DualPipeV", "pp2/2/fp32", "plain"),
                ("torch_pipeline_dp:Replicated", "dp2-pp2/4/fp32", "plain"),
                ("torch_pipeline_dp:ShardedZeroBubble", "dp2-pp2/4/fp32", "plain"),
                ("deepspeed_pipe:Stack", "pp2/2/fp32", "plain"),
                ("peft_adapters:Lora", "dp2/2/fp32", "accumulate-no-sync"),
                ("peft_adapters:Dora", "dp2/2/fp32", "accumulate"),
                ("peft_adapters:Ia3", "dp2/2/fp32", "accumulate"),
                ("peft_adapters:ModulesToSave", "dp2/2/fp32", "accumulate-uneven"),
                ("peft_plan:PlanLora", "tp2/2/fp32", "accumulate"),
                ("torchao_float8:Tensorwise", "dp2/2/fp32", "accumulate"),
                ("torchao_float8_tp:Stack", "tp2/2/fp32", "accumulate"),
                ("torchao_float8:Rowwise", "dp2/2/fp32", "accumulate-uneven"),
            ]
        ),
        pytest.param(
            *("torchtitan_debug:Stack", "dp_shard2-tp1/2/fp32", "accumulate-uneven"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("torchtitan_debug:Stack", "dp_shard1-tp2/2/fp32", "accumulate"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_right_stack_passes(
    runner: Runner, stack: str, place: str, recipe: str
) -> None:
    found = judged(runner, stack, place, recipe)
    assert found.status == "pass", (found.problem, found.verdicts)
    assert {v.law for v in found.verdicts if v.status == "pass"} >= COMPARED


@pytest.mark.parametrize("stack", ["deepspeed_zero:Zero1", "deepspeed_stages:Zero2"])
def test_earlier_backwards_that_zero_drops_are_found(
    runner: Runner, stack: str
) -> None:
    found = judged(runner, stack, "dp2/2/fp32", "accumulate")
    assert found.status == "fail", found.problem
    told = {v.law for v in found.verdicts if v.status == "fail"}
    assert told >= {"parity.gradient", "parity.update"}
    # ranks agree all the same, and no collective strays
    assert {law.partition(".")[0] for law in told} <= {"parity", "norm"}


@pytest.mark.parametrize(
    ("stack", "place", "parameter"),
    [
        ("torch_pipelines:FrozenStage", "pp2/2/fp32", "2.bias"),
        pytest.param(
            *("peft_plan:PlanModulesToSave", "tp2/2/fp32"),
            "base_model.model.lm_head.modules_to_save.default.weight",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_part_that_is_not_trained_is_found(
    runner: Runner, stack: str, place: str, parameter: str
) -> None:
    found = judged(runner, stack, place, "plain")
    assert found.status == "fail", found.problem
    told = {v.law: v for v in found.verdicts if v.status == "fail"}
    assert told["parity.update"].parameter == parameter
    assert told.keys() <= COMPARED


def confirmed(package: str, *command: str) -> str:
    """What a script says that knows nothing of gradparity."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see docs/stacks.md")
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_deepspeed_alone_drops_earlier_backwards() -> None:
    told = confirmed("deepspeed", str(STACKS / "confirm_deepspeed.py"))
    for stage, managed, kept in [
        (1, True, "the last"),
        (2, True, "the last"),
        (3, True, "both"),
        (1, False, "both"),
        (2, False, "both"),
    ]:
        line = f"ZeRO {stage}, managed {managed}: trains on {kept} of two backwards"
        assert line in told


@pytest.mark.slow
def test_transformers_alone_multiplies_what_was_accumulated() -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    told = confirmed("transformers", *launch, str(STACKS / "confirm_qwen3.py"))
    off = {
        line.partition(":")[0]: float(line.partition("differs by ")[2].split()[0])
        for line in told.splitlines()
        if "differs by" in line
    }
    assert off["one process"] < 1e-5
    assert off["under the plan"] > 0.1


def test_every_file_takes_at_most_sixty_lines() -> None:
    lengths = {p.name: len(p.read_text().splitlines()) for p in STACKS.glob("*.py")}
    assert lengths.keys() >= {f"{stack}.py" for stack in PACKAGES}
    assert {name: n for name, n in lengths.items() if n > 60} == {}


@pytest.mark.slow
def test_what_torch_refuses_is_an_error(runner: Runner) -> None:
    stack = "torch_pipeline_dp:ReplicatedGPipe"
    found = judged(runner, stack, "dp2-pp2/4/fp32", "plain")
    assert found.status == "error"
    assert "train_step: raised RuntimeError" in found.problem
