"""Two hosts, made of namespaces: FSDP across them, tensor parallel within each."""

import subprocess
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[2] / "examples" / "trainers" / "fsdp2_tp.py"
LIMIT_S = 240.0


def train(on_two_hosts: tuple[str, ...], folder: Path, link: str) -> list[str]:
    """Train on two hosts of two ranks; return each rank's losses and scales."""
    if link == "slow" and not Path("/dev/net/tun").exists():
        pytest.skip("there is no /dev/net/tun for the slow link")
    folder.mkdir()
    program = (str(TRAINER), "--steps", "3", "--folder", str(folder / "trained"))
    done = subprocess.run(
        [*on_two_hosts, link, str(folder), *program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    logs = "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))
    assert done.stdout == "0 0\n", done.stdout + done.stderr + logs
    curves = sorted((folder / "trained").glob("curve-*.jsonl"))
    assert len(curves) == 4
    return [curve.read_text() for curve in curves]


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S + 30)
def test_a_slow_link_that_loses_packets_changes_no_bit(
    on_two_hosts: tuple[str, ...], tmp_path: Path
) -> None:
    fast = train(on_two_hosts, tmp_path / "veth", "veth")
    # 2^19 overflows in fp16: the ranks of both hosts skip, and agree on the scale.
    scales = [[line.split()[-1] for line in curve.splitlines()] for curve in fast]
    assert scales == [["524288.0]", "262144.0]", "131072.0]"]] * 4
    assert train(on_two_hosts, tmp_path / "slow", "slow") == fast
