"""Which axes of a workload's meshes split the data: known, declared, or refused."""

from pathlib import Path

import pytest

from gradparity.conformance import Runner, Scenario
from gradparity.conformance.__main__ import main
from gradparity.fixtures import resolve_workload
from gradparity.tests.workloads import stacks

MODULE = "gradparity.tests.workloads.stacks"


@pytest.mark.parametrize(
    ("stack", "place"),
    [
        (stacks.NeverAverages, "dp2/2"),
        (stacks.NeverAverages, "data2/2"),
        (stacks.NeverAverages, "dp_replicate2/2"),
        (stacks.NeverAverages, "dp_shard2-tp1/2"),
        (stacks.NeverAveragesOverRows, "rows2/2"),
    ],
)
def test_a_stack_that_never_averages_fails_under_every_name_of_its_axis(
    runner: Runner, stack: type, place: str
) -> None:
    text = f"{place}/fp32/own/none/model={MODULE}:{stack.__name__},steps=2"
    found = runner.run("none", Scenario.parse(text))
    assert found.status == "fail", found.problem
    failed = {v.law for v in found.verdicts if v.status == "fail"}
    assert failed >= {"agreement.replicas", "parity.gradient"}


@pytest.mark.parametrize(
    ("stack", "split"),
    [
        (stacks.Right, {"dp2": ("dp",), "dp2-tp2": ("dp",)}),
        (stacks.NeverAveragesOverRows, {"rows2": ("rows",)}),
        (stacks.ExpertsSeeTheSameRows, {"dp2-ep2": ("dp",)}),
    ],
)
def test_a_mesh_knows_its_axes_that_split_the_data(
    stack: type, split: dict[str, tuple[str, ...]]
) -> None:
    topologies = resolve_workload(f"{MODULE}:{stack.__name__}").topologies
    assert {n: topologies[n].data_axes for n in split} == split
    (name, axes), *_ = split.items()
    assert f"rows split over {', '.join(axes)}" in topologies[name].text


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (stacks.UnknownAxis, "the axis 'colour' is unknown: declare data_axes ="),
        (stacks.DeclaresNoMesh, "data_axes: no mesh has the axis 'rows'"),
        (stacks.DeclaresText, "data_axes: got 'dp', expected a tuple of names"),
        (stacks.DeclaresBoth, "'dp' is in data_axes and in model_axes"),
    ],
)
def test_unknown_axes_are_usage_errors(
    stack: type, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"{MODULE}:{stack.__name__}"
    assert main(["run", "--workload", spec, f"--out={tmp_path / 'out'}"]) == 2
    told = capsys.readouterr().err
    assert f"workload {spec}: " in told
    assert words in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()
