"""Our scaler in real trainers, their own steps judged, findings shown without us.

A package that is not installed skips its tests: see docs/integrations.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradparity
from gradparity.conformance import Case, Runner, Scenario, Status

ROOT = Path(gradparity.__file__).parent
OURS = "gradparity.scaler:GradScaler"
TORCH = "torch.amp:GradScaler"
HERE = "examples.integrations"
# packages warn while they are imported, about themselves
pytestmark = pytest.mark.filterwarnings("ignore")
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        with Runner(folder=str(ROOT), timeout_s=200) as made:
            yield made


def judged(runner: Runner, package: str, scaler: str, workload: str, at: str) -> Case:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see docs/integrations")
    settings = f"model={HERE}.{workload},steps=5,scale=1024,interval=2"
    where = f"{at}/fp16-autocast/own/inf@r1s1:first/{settings}"
    return runner.run(scaler, Scenario.parse(where))


@pytest.mark.parametrize(
    ("package", "workload", "at"),
    [
        ("accelerate", "accelerate_step:Ddp", "ddp2/2"),
        pytest.param(
            "pytorch_lightning", "lightning_step:ModelParallelOurs", "fsdp2/2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "accelerate", "accelerate_step:DdpFused", "ddp2/2", marks=pytest.mark.slow
        ),
        pytest.param(
            "torchtitan", "torchtitan_step:OursFused", "dp_shard2/2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fairseq2", "fairseq2_step:Fsdp2", "fsdp2/2", marks=pytest.mark.slow
        ),
        pytest.param(
            "verl", "verl_fsdp:Fsdp2FusedOurs", "fsdp2/2", marks=pytest.mark.slow
        ),
        pytest.param(
            "rlinf", "rlinf_fsdp:Fsdp2FusedOurs", "fsdp2/2", marks=pytest.mark.slow
        ),
        pytest.param(
            "lerobot", "lerobot_step:LeRobotOurs", "ddp2/2", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_with_our_scaler_no_law_is_broken(
    runner: Runner, package: str, workload: str, at: str
) -> None:
    found = judged(runner, package, OURS, workload, at)
    assert found.status is Status.PASS, (found.problem, found.verdicts)
    assert {v.law for v in found.verdicts if v.status is Status.PASS} >= {
        "skip.all-ranks-skip", "scale.rule", "parity.gradient", "trainer.schedule",
    }  # fmt: skip


@pytest.mark.slow
def test_a_chain_of_megatron_agrees_with_one_scaler_only(runner: Runner) -> None:
    at = ("megatron_chained:Chain", "dp2/2")
    own, shared = (
        judged(runner, "megatron", f"{HERE}.megatron_chained:{name}", *at)
        for name in ("Own", "Shared")
    )
    told = {v.law for v in own.verdicts if v.status is Status.FAIL}
    assert "parity.gradient" in told
    assert shared.status is Status.PASS, (shared.problem, shared.verdicts)


def said(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CONFIRMED = {
    "accelerate": (
        "fused False: skipped True, schedule moved by 0",
        "fused True: skipped False, schedule moved by 2",
        "_growth_tracker: saved 1, after load_state 2",
    ),
    "pytorch_lightning": (
        "scale 512, averaged 2 times, schedule at 2",
        "ModelParallelStrategy with precision: refused",
        "ModelParallelStrategy with plugins: taken",
        "FSDPPrecision with a scaler: refused",
    ),
    "megatron": ("step 1: loss scaled by 512, skipped False, gradients 1 and 0.5",),
}
SCRIPTS = {"pytorch_lightning": "lightning"}


@pytest.mark.slow
@pytest.mark.parametrize("package", CONFIRMED)
def test_a_finding_is_seen_without_us(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see docs/integrations")
    name = SCRIPTS.get(package, package)
    script = str(ROOT / HERE.replace(".", "/") / f"confirm_{name}.py")
    assert "import gradparity" not in Path(script).read_text()
    told = said(*[*LAUNCH, "2"] * (package == "accelerate"), script)
    for line in CONFIRMED[package]:
        assert line in told, told


@pytest.mark.slow
def test_a_policy_gradient_keeps_its_ranks_together(tmp_path: Path) -> None:
    script, out = str(ROOT / "examples" / "rl_fp16.py"), tmp_path / "rl.json"
    said(*LAUNCH, "4", script, "--steps", "3", "--out", str(out))
    steps = json.loads(out.read_text())
    assert [len(set(step["scales"])) for step in steps] == [1, 1, 1]
    assert all(step["apart"] == 0 and step["off_max"] < 0.05 for step in steps)
    assert steps[-1]["scales"][0] < 2.0**24  # it overflowed
    assert len(Path(script).read_text().splitlines()) <= 160


def test_the_record_is_what_the_page_shows() -> None:
    from gradparity.benchmarks import integrations, rl

    for page, made, record in (
        (integrations.PAGE, integrations.tables, integrations.RESULT),
        (rl.PAGE, rl.tables, rl.RESULT),
    ):
        text = page.read_text()
        for table in made(json.loads(record.read_text())).values():
            assert table in text
