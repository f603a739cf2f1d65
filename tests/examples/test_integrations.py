"""Our scaler in real trainers, checks of their steps, and scripts of findings.

Packages that are in no extra skip their tests: see docs/integrations.
"""

import ast
import importlib
import importlib.util
import json
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradparity
from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.examples.integrations.wait_for_steps import wait_for_steps
from gradparity.scaler import GradScaler
from gradparity.tests.extras import needs

ROOT = Path(gradparity.__file__).parent
OURS = "gradparity.scaler:GradScaler"
TORCH = "torch.amp:GradScaler"
HERE = "examples.integrations"
SAVES_NO_SCALER = ("lerobot", "rlinf", "verl")
# packages warn while they are imported, about themselves
pytestmark = pytest.mark.filterwarnings("ignore")


def on_ranks(python: list[str], ranks: int) -> list[str]:
    """Return the start of a command line that runs a program under torchrun."""
    launch = [*python, "-m", "torch.distributed.run", "--standalone"]
    return [*launch, f"--nproc-per-node={ranks}", "--no-python", *python]


def row(package: str, *others: str, slow: bool = False) -> Any:
    """Return a case of ``parametrize``, marked as needing ``package``."""
    marks = [*needs(package), *[pytest.mark.slow] * slow]
    return pytest.param(package, *others, marks=marks)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        with Runner(folder=str(ROOT), timeout_s=200) as made:
            yield made


def checked(runner: Runner, package: str, scaler: str, workload: str, at: str) -> Case:
    settings = f"model={HERE}.{workload},steps=5,scale=1024,interval=2"
    where = f"{at}/fp16-autocast/own/inf@r1s1:first/{settings}"
    return runner.run(scaler, Scenario.parse(where))


@pytest.mark.parametrize(
    ("package", "workload", "at"),
    [
        row("accelerate", "accelerate_step:Ddp", "ddp2/2"),
        row(
            *("pytorch_lightning", "lightning_step:ModelParallelOurs", "fsdp2/2"),
            slow=True,
        ),
        row("accelerate", "accelerate_step:DdpFused", "ddp2/2", slow=True),
        row("accelerate", "accelerate_step:Fsdp2Ours", "fsdp2/2", slow=True),
        row("torchtitan", "torchtitan_step:OursFused", "dp_shard2/2", slow=True),
        row("torchtitan", "torchtitan_step:Ours", "pp2-dp_shard2-tp2/8", slow=True),
        row("fairseq2", "fairseq2_step:Fsdp2", "fsdp2/2", slow=True),
        row("verl", "verl_fsdp:Fsdp2FusedOurs", "fsdp2/2", slow=True),
        row("rlinf", "rlinf_fsdp:Fsdp2FusedOurs", "fsdp2/2", slow=True),
        row("lerobot", "lerobot_step:LeRobotOurs", "ddp2/2", slow=True),
    ],
)
def test_with_our_scaler_no_check_fails(
    runner: Runner, package: str, workload: str, at: str
) -> None:
    found = checked(runner, package, OURS, workload, at)
    assert found.status is Status.PASS, (found.problem, found.verdicts)
    due = {"skip.all-ranks-skip", "scale.rule", "parity.gradient", "trainer.schedule"}
    if package not in SAVES_NO_SCALER:
        due.add("trainer.checkpoint")
    assert {v.law for v in found.verdicts if v.status is Status.PASS} >= due


COPIED = {
    "use_in_accelerate": "accelerate",
    "use_in_lightning": "pytorch_lightning",
    "use_in_megatron": "megatron",
    "wait_for_steps": "torch",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs(p)) for n, p in COPIED.items()]
)
def test_a_file_to_copy_stands_alone(name: str, tmp_path: Path) -> None:
    """A recipe to copy imports only the package, torch and the scaler."""
    text = (ROOT / HERE.replace(".", "/") / f"{name}.py").read_text()
    copy = tmp_path / f"{name}.py"
    copy.write_text(text)
    spec = importlib.util.spec_from_file_location(f"copied_{name}", copy)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    ours = [
        node.module
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and "gradparity" in str(node.module)
    ]
    assert ours == ["gradparity.scaler"]
    code = [x for x in text.split('"""', 2)[2].splitlines() if x.strip()]
    assert len(code) <= 45


def test_a_schedule_waits_and_can_be_pickled() -> None:
    p = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([p]), GradScaler("cpu", init_scale=4.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    wait_for_steps(scheduler, scaler)
    for loss in (p.sum() * torch.inf, p.sum()):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert scheduler.last_epoch == 1
    again = pickle.loads(pickle.dumps(scheduler))
    assert again.state_dict() == scheduler.state_dict()
    assert isinstance(again, torch.optim.lr_scheduler.StepLR)


def test_a_scaler_survives_a_file_of_safetensors(tmp_path: Path) -> None:
    torch_files = importlib.import_module("safetensors.torch")
    first, second = GradScaler("cpu", 1024.0, 1.5), GradScaler("cpu")
    for bad in (False, True, False):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight])
        first.scale(weight.sum() * (torch.inf if bad else 1.0)).backward()
        first.step(optimizer)
        first.update()
    state = first.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (512.0, 1)
    file = tmp_path / "scaler.safetensors"
    torch_files.save_file({k: torch.tensor(v) for k, v in state.items()}, file)
    second.load_state_dict(torch_files.load_file(file))
    assert second.state_dict() == state


@pytest.mark.slow
@pytest.mark.extras("megatron")
def test_a_chain_of_megatron_agrees_with_one_scaler_only(runner: Runner) -> None:
    at = ("megatron_chained:Chain", "dp2/2")
    own, shared = (
        checked(runner, "megatron", f"{HERE}.megatron_chained:{name}", *at)
        for name in ("Own", "Shared")
    )
    told = {v.law for v in own.verdicts if v.status is Status.FAIL}
    assert "parity.gradient" in told
    assert shared.status is Status.PASS, (shared.problem, shared.verdicts)


def said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CONFIRMED = {
    "accelerate": (
        "fused False: skipped True, schedule moved by 0",
        "fused True: skipped False, schedule moved by 2",
        "_growth_tracker: saved 1, after load_state 2",
        "_growth_tracker: 0, after save_state 1",
    ),
    "pytorch_lightning": (
        "scale 512, averaged 2 times, schedule at 2",
        "ModelParallelStrategy with precision: refused",
        "ModelParallelStrategy with plugins: taken",
        "FSDPPrecision with a scaler: refused",
    ),
    "megatron": ("step 1: loss scaled by 512, skipped False, gradients 1 and 0.5",),
    "verl": (
        "overflow: parameters unchanged True, scale 512, schedule moved by 1",
        "fused: raises ",
        "checkpoint: model, optimizer, and in the extra state lr_scheduler, rng",
    ),
    "rlinf": (
        "build_optimizer: fused None",
        "overflow: parameters unchanged True, scale 512, schedule moved by 1",
        "checkpoint: fsdp_version, lr_schedulers, model, optimizers, rng",
    ),
    "lerobot": (
        "overflow: parameters unchanged True, skipped True, scale 512, schedule moved "
        "by 1",
        "checkpoint: optimizer_param_groups.json, optimizer_state.safetensors, "
        "rng_state.safetensors, scheduler_state.json, training_step.json",
    ),
}
ON_TWO_RANKS = ("accelerate", "rlinf", "verl")
SCRIPTS = {"pytorch_lightning": "lightning"}


@pytest.mark.parametrize("package", [row(each, slow=True) for each in CONFIRMED])
def test_a_script_confirms_each_finding_without_gradparity(
    package: str, warm_python: list[str]
) -> None:
    name = SCRIPTS.get(package, package)
    script = str(ROOT / HERE.replace(".", "/") / f"confirm_{name}.py")
    assert "import gradparity" not in Path(script).read_text()
    two = package in ON_TWO_RANKS
    told = said(*(on_ranks(warm_python, 2) if two else warm_python), script)
    for line in CONFIRMED[package]:
        assert line in told, told


@pytest.mark.slow
def test_a_policy_gradient_keeps_its_ranks_together(
    tmp_path: Path, warm_python: list[str]
) -> None:
    script, out = str(ROOT / "examples" / "rl_fp16.py"), tmp_path / "rl.json"
    said(*on_ranks(warm_python, 4), script, "--steps", "3", "--out", str(out))
    steps = json.loads(out.read_text())
    assert [len(set(step["scales"])) for step in steps] == [1, 1, 1]
    assert all(step["apart"] == 0 and step["off_max"] < 0.05 for step in steps)
    assert steps[-1]["scales"][0] < 2.0**24  # it overflowed


def test_the_record_is_what_the_page_shows() -> None:
    from gradparity.benchmarks.validation import integrations, rl

    for page, made, record in (
        (integrations.PAGE, integrations.tables, integrations.RESULT),
        (rl.PAGE, rl.tables, rl.RESULT),
    ):
        text = page.read_text()
        for table in made(json.loads(record.read_text())).values():
            assert table in text
