"""Frameworks as workloads: right ones pass, wrong ones fail a check.

Each failure is a fault of a released package, which a script shows with that package
alone. If a test fails because the fault is gone, the package was fixed.
"""

import importlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradparity
from gradparity.conformance import Case, Runner, Scenario
from gradparity.multiprocess import Cluster
from gradparity.tests.extras import needs

ROOT = Path(gradparity.__file__).parent
STACKS = ROOT / "examples" / "stacks"
PACKAGES = {
    "accelerate_fsdp2": "accelerate",
    "deepspeed_bf16": "deepspeed",
    "deepspeed_pipe": "deepspeed",
    "deepspeed_stages": "deepspeed",
    "deepspeed_zero": "deepspeed",
    "diffusers_flux": "diffusers",
    "fairscale_sharded": "fairscale",
    "hf_trainer": "transformers",
    "lightning_model_parallel": "pytorch_lightning",
    "megatron_fsdp_stages": "megatron_fsdp",
    "megatron_fsdp_zero3": "megatron_fsdp",
    "megatron_gpt": "megatron",
    "nemo_automodel_qwen3": "nemo_automodel",
    "olmo_core_axes": "olmo_core",
    "olmo_core_llama": "olmo_core",
    "peft_adapters": "peft",
    "peft_plan": "peft",
    "ring_attention": "ring_attention_pytorch",
    "torch_compiled_fsdp2": "torch",
    "torch_ddp_hooks": "torch",
    "torch_fsdp1": "torch",
    "torch_fsdp1_flat": "torch",
    "torch_fsdp1_no_shard": "torch",
    "torch_hsdp_all_reduce": "torch",
    "torch_interleaved": "torch",
    "torch_pipeline": "torch",
    "torch_pipeline_calls": "torch",
    "torch_pipeline_dp": "torch",
    "torch_pipelines": "torch",
    "torch_zero_redundancy": "torch",
    "torchao_float8": "torchao",
    "torchao_float8_tp": "torchao",
    "torchao_int8": "torchao",
    "torchao_int8_tp": "torchao",
    "torchao_optimizers": "torchao",
    "torchao_optimizers_saved": "torchao",
    "torchtitan_debug": "torchtitan",
    "trl_sft": "trl",
    "vector_quantize_lfq": "vector_quantize_pytorch",
}
# packages warn while they are imported, about themselves
pytestmark = pytest.mark.filterwarnings("ignore")
COMPARED = {"parity.gradient", "parity.update", "parity.loss"}


def row(stack: str, *others: object, slow: bool = False) -> Any:
    """Return a case of ``parametrize``, marked as needing its workload's package."""
    marks = [*needs(PACKAGES[stack.partition(":")[0]]), *[pytest.mark.slow] * slow]
    return pytest.param(stack, *others, marks=marks)


# DeepSpeed leaves groups in its modules and its own linear in torch.nn.functional, its
# pipeline a topology; the last one hides a package
APART = ("deepspeed_pipe", "deepspeed", "megatron_fsdp")
Check = Callable[[str, str, str], Case]


@pytest.fixture(scope="module")
def checked() -> Iterator[Check]:
    """Yield a function that runs a workload in a scenario, on warm ranks."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as runners:
        patch.syspath_prepend(str(ROOT))

        @cache
        def runner(_: str) -> Runner:
            return runners.enter_context(Runner(folder=str(ROOT), timeout_s=600))

        def check(stack: str, place: str, recipe: str) -> Case:
            settings = f"model=examples.stacks.{stack},recipe={recipe},steps=3"
            scenario = Scenario.parse(f"{place}/own/none/{settings}")
            apart = next(filter(stack.startswith, APART), "")
            return runner(apart).run("none", scenario)

        yield check


@pytest.mark.parametrize(
    ("stack", "place", "recipe"),
    [
        row("deepspeed_zero:Zero1", "dp2/2/fp32", "plain"),
        row("deepspeed_stages:Zero2", "dp2/2/fp32", "plain"),
        row("deepspeed_stages:Zero3", "dp2/2/fp32", "accumulate-uneven"),
        row("deepspeed_stages:Owned1", "dp2/2/fp32", "accumulate-uneven"),
        row("deepspeed_stages:Owned2", "dp2/2/fp32", "accumulate"),
        row("deepspeed_bf16:Zero2", "dp2/2/bf16-params", "accumulate-uneven"),
        row("deepspeed_bf16:Zero2", "dp2/2/bf16-params", "resume"),
        row("accelerate_fsdp2:Stack", "dp2/2/fp32", "accumulate-uneven"),
        row("accelerate_fsdp2:Stack", "dp2/2/bf16-autocast", "accumulate"),
        row("hf_trainer:Stack", "dp2/2/fp32", "accumulate-uneven"),
        row("lightning_model_parallel:Stack", "dp2-tp1/2/fp32", "accumulate-uneven"),
        row("lightning_model_parallel:Stack", "dp1-tp2/2/fp32", "accumulate"),
        row("megatron_gpt:Stack", "tp2/2/fp32", "accumulate"),
        row("torch_pipelines:ZeroBubbleV", "pp2/2/fp32", "plain"),
        row("fairscale_sharded:Stack", "dp2/2/fp32", "plain"),
        row("megatron_fsdp_zero3:Zero3", "dp2-tp1/2/fp32", "accumulate-uneven"),
        row("torch_ddp_hooks:Fp16", "dp2/2/fp32", "accumulate"),
        row("torch_fsdp1:Full", "dp2/2/fp32", "accumulate-uneven"),
        row("torch_fsdp1_flat:Flat", "dp2/2/fp32", "accumulate-uneven"),
        row("torch_fsdp1_no_shard:NoShard", "dp2/2/fp32", "accumulate"),
        row("torch_zero_redundancy:Stack", "dp2/2/fp32", "accumulate-uneven"),
        row("torchao_float8:Float8AllGather", "dp2/2/fp32", "accumulate-uneven"),
        row("torchao_int8:Stack", "dp2/2/fp32", "accumulate-uneven"),
        row("torchao_int8_tp:Stack", "tp2/2/fp32", "accumulate"),
        row("ring_attention:NoRing", "dp2/2/fp32", "accumulate-uneven"),
        row("vector_quantize_lfq:SampleEntropy", "dp2/2/fp32", "plain"),
        row("olmo_core_llama:Fsdp", "dp2/2/fp32", "accumulate-uneven"),
        row("olmo_core_axes:Tensor", "dp1-tp2/2/fp32", "resume"),
        row("trl_sft:Sft", "dp2/2/fp32", "accumulate-uneven"),
        row("nemo_automodel_qwen3:Stack", "dp2-tp1/2/fp32", "accumulate-uneven"),
        row("diffusers_flux:Ulysses", "ring1-ulysses2/2/fp32", "accumulate-uneven"),
        *(
            row(*each, slow=True)
            for each in [
                ("torch_pipeline:GPipe", "pp2/2/fp32", "plain"),
                ("torch_pipeline_calls:OneForwardOneBackward", "pp2/2/fp32", "plain"),
                ("torch_interleaved:LoopedBfs", "pp2/2/fp32", "plain"),
                ("torch_interleaved:Interleaved", "pp2/2/fp32", "plain"),
                ("torch_pipelines:InterleavedZeroBubble", "pp2/2/fp32", "plain"),
                ("torch_pipelines:DualPipeV", "pp2/2/fp32", "plain"),
                ("torch_pipeline_dp:Replicated", "dp2-pp2/4/fp32", "plain"),
                ("torch_pipeline_dp:ShardedZeroBubble", "dp2-pp2/4/fp32", "plain"),
                ("deepspeed_pipe:Stack", "pp2/2/fp32", "plain"),
                ("megatron_fsdp_stages:Zero1", "dp2-tp1/2/fp32", "accumulate"),
                ("megatron_fsdp_stages:Zero2", "dp2-tp1/2/fp32", "accumulate-uneven"),
                ("torch_compiled_fsdp2:Layers", "dp2/2/fp32", "accumulate"),
                ("torch_compiled_fsdp2:Whole", "dp2/2/fp32", "accumulate-no-sync"),
                ("torch_ddp_hooks:Plain", "dp2/2/fp32", "accumulate-no-sync"),
                ("torch_fsdp1:GradientsAndStates", "dp2/2/fp32", "accumulate-no-sync"),
                ("torch_fsdp1:Hybrid", "dp_replicate2-dp_shard2/4/fp32", "accumulate"),
                (
                    *(
                        "torch_hsdp_all_reduce:EachUsed",
                        "dp_replicate2-dp_shard1/2/fp32",
                    ),
                    "accumulate",
                ),
                ("torch_zero_redundancy:Buckets", "dp2/2/fp32", "clip-norm"),
                ("olmo_core_axes:Tensor", "dp2-tp1/2/fp32", "clip-norm"),
                ("nemo_automodel_qwen3:Stack", "dp1-tp2/2/fp32", "accumulate"),
                ("olmo_core_axes:Ulysses", "dp1-cp2/2/fp32", "accumulate-uneven"),
                ("olmo_core_axes:Hybrid", "dp_replicate2-dp_shard2/4/fp32", "resume"),
                ("peft_adapters:Lora", "dp2/2/fp32", "accumulate-no-sync"),
                ("peft_adapters:Dora", "dp2/2/fp32", "accumulate"),
                ("peft_adapters:Ia3", "dp2/2/fp32", "accumulate"),
                ("peft_adapters:ModulesToSave", "dp2/2/fp32", "accumulate-uneven"),
                ("peft_plan:PlanLora", "tp2/2/fp32", "accumulate"),
                ("torchao_float8:Tensorwise", "dp2/2/fp32", "accumulate"),
                ("torchao_float8_tp:Stack", "tp2/2/fp32", "accumulate"),
                ("torchao_float8:Rowwise", "dp2/2/fp32", "accumulate-uneven"),
                ("torchao_float8:Tensorwise", "dp2/2/fp32", "clip-value"),
                ("torchao_int8:Stack", "dp2/2/fp32", "resume"),
                ("torchao_optimizers_saved:Four", "dp2/2/fp32", "resume"),
            ]
        ),
        row(
            *("torchtitan_debug:Stack", "dp_shard1-tp2/2/fp32", "accumulate"),
            slow=True,
        ),
    ],
)
@pytest.mark.few(2)
def test_a_right_stack_passes(
    checked: Check, stack: str, place: str, recipe: str
) -> None:
    found = checked(stack, place, recipe)
    assert found.status == "pass", (found.problem, found.verdicts)
    assert {v.law for v in found.verdicts if v.status == "pass"} >= COMPARED


@pytest.mark.parametrize(
    "stack", [row("deepspeed_zero:Zero1"), row("deepspeed_stages:Zero2")]
)
def test_earlier_backwards_that_zero_drops_are_found(
    checked: Check, stack: str
) -> None:
    found = checked(stack, "dp2/2/fp32", "accumulate")
    assert found.status == "fail", found.problem
    told = {v.law for v in found.verdicts if v.status == "fail"}
    assert told >= {"parity.gradient", "parity.update"}
    # ranks agree all the same, and no collective strays
    assert {law.partition(".")[0] for law in told} <= {"parity", "norm"}


@pytest.mark.parametrize(
    ("stack", "place", "recipe", "laws"),
    [
        row(
            *("torch_fsdp1:HybridOne", "dp_replicate2-dp_shard1/2/fp32", "plain"),
            {"agreement.replicas", *COMPARED},
        ),
        row(
            *("torch_hsdp_all_reduce:Branch", "dp_replicate2-dp_shard1/2/fp32"),
            *("accumulate", set() if torch.__version__ >= "2.15" else COMPARED),
        ),
        row("fairscale_sharded:OptimizerClears", "dp2/2/fp32", "plain", COMPARED),
        row(
            *("torch_fsdp1_no_shard:NoShardBranch", "dp2/2/fp32", "accumulate"),
            {"agreement.replicas", *COMPARED},
        ),
        row("ring_attention:Automatic", "dp2/2/fp32", "plain", COMPARED),
        row("ring_attention:ByHand", "dp2/2/fp32", "accumulate", COMPARED),
        row("vector_quantize_lfq:CodebookEntropy", "dp2/2/fp32", "plain", COMPARED),
        row("trl_sft:HeadApart", "dp2/2/fp32", "plain", COMPARED),
        row(
            *("megatron_fsdp_stages:WeightsNotOverlapped", "dp2-tp1/2/fp32"),
            *("plain", COMPARED),
        ),
        row(
            *("megatron_fsdp_stages:GradientsNotOverlapped", "dp2-tp1/2/fp32"),
            *("plain", COMPARED),
        ),
    ],
)
def test_a_finding_of_docs_wild_fails_its_checks(
    checked: Check, stack: str, place: str, recipe: str, laws: set[str]
) -> None:
    """A workload fails these checks, or none if the package's version has no fault."""
    found = checked(stack, place, recipe)
    assert found.status == ("fail" if laws else "pass"), found.problem
    assert {v.law for v in found.verdicts if v.status == "fail"} == laws


@pytest.mark.parametrize(
    ("stack", "place", "parameter"),
    [
        ("torch_pipelines:FrozenStage", "pp2/2/fp32", "2.bias"),
        row(
            *("peft_plan:PlanModulesToSave", "tp2/2/fp32"),
            "base_model.model.lm_head.modules_to_save.default.weight",
            slow=True,
        ),
    ],
)
def test_a_part_that_is_not_trained_is_found(
    checked: Check, stack: str, place: str, parameter: str
) -> None:
    found = checked(stack, place, "plain")
    assert found.status == "fail", found.problem
    told = {v.law: v for v in found.verdicts if v.status == "fail"}
    assert told["parity.update"].parameter == parameter
    assert told.keys() <= COMPARED


@pytest.mark.extras("olmo_core")
def test_a_loss_by_the_counts_of_each_rank_is_found(checked: Check) -> None:
    found = checked("olmo_core_axes:Masked", "dp2/2/fp32", "plain")
    told = {v.law for v in found.verdicts if v.status == "fail"}
    assert (found.status, told) == ("fail", COMPARED), found.problem


def confirmed(*command: str) -> str:
    """Run a script that needs no gradparity; return its output."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.extras("deepspeed")
def test_deepspeed_alone_drops_earlier_backwards(warm_python: list[str]) -> None:
    told = confirmed(*warm_python, str(STACKS / "confirm_deepspeed.py"))
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
@pytest.mark.extras("transformers")
def test_transformers_alone_multiplies_what_was_accumulated(
    warm_python: list[str],
) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ranks = ("--no-python", *warm_python, str(STACKS / "confirm_qwen3.py"))
    told = confirmed(*warm_python, *launch, *ranks)
    off = {
        line.partition(":")[0]: float(line.partition("differs by ")[2].split()[0])
        for line in told.splitlines()
        if "differs by" in line
    }
    assert off["one process"] < 1e-5
    assert off["under the plan"] > 0.1


def trained(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the weights after steps of DDP, and the results of other collectives."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4, dtype=dtype)
    model = DistributedDataParallel(layer)
    rank = dist.get_rank()
    rows = torch.randn(2, 3, 4, dtype=dtype)[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(rows).pow(2).mean().backward()
        optimizer.step()
    part, both = torch.empty(2, 4, dtype=dtype), torch.empty(8, 4, dtype=dtype)
    mine = layer.weight.detach() + rank
    work = dist.reduce_scatter_tensor(part, mine, async_op=True)
    work.wait()
    work = dist.all_gather_into_tensor(both, input_tensor=mine, async_op=True)
    work.wait()
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return [p.detach().clone() for p in model.parameters()] + [part, both, mine]


def premultiplied() -> dict[str, torch.Tensor]:
    """Return the results of collectives that sum inputs times a quarter."""
    quarter = dist._make_nccl_premul_sum(0.25)
    mine = torch.arange(4.0) + dist.get_rank()
    with torch.cuda.stream(torch.cuda.Stream()), dist._coalescing_manager():
        part = torch.empty(2)
        dist.reduce_scatter_tensor(output=part, input=mine, op=quarter)
        whole = mine.clone()
        dist.all_reduce(whole, op=quarter)
        torch.cuda.current_stream().record_event().wait()
    return {"input": mine, "scattered": part, "summed": whole}


def without(call: Callable[..., Any], *given: Any) -> Any:
    """Call a function on a rank while examples/stacks replaces torch.cuda."""
    stand_in = importlib.import_module("gradparity.examples.stacks.without_cuda")
    with stand_in.without_cuda():
        return call(*given)


def test_the_stand_in_for_cuda_changes_no_result(two: Cluster) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        plain, stood_in = two.run(trained, dtype), two.run(without, trained, dtype)
        for there, here in zip(plain, stood_in, strict=True):
            assert all(map(torch.equal, there, here))
    for rank, told in enumerate(two.run(without, premultiplied)):
        assert told["input"].tolist() == [rank, rank + 1, rank + 2, rank + 3]
        summed = [0.25, 0.75, 1.25, 1.75]
        assert told["summed"].tolist() == summed
        assert told["scattered"].tolist() == summed[2 * rank : 2 * rank + 2]
    assert two.run(still_there) == [(True, True)] * 2


def still_there() -> tuple[bool, bool]:
    """Return True for each patched function of torch that is original again."""
    given = dist.all_reduce.__module__ == "torch.distributed.distributed_c10d"
    return given, isinstance(torch.cuda.Stream, type)


@pytest.mark.slow
def test_what_torch_refuses_is_an_error(checked: Check) -> None:
    stack = "torch_pipeline_dp:ReplicatedGPipe"
    found = checked(stack, "dp2-pp2/4/fp32", "plain")
    assert found.status == "error"
    assert "train_step: raised RuntimeError" in found.problem
