"""Names of earlier versions still read: ids, laws, reports, baselines, options."""

import json
from pathlib import Path

import pytest

from gradparity.ci.baseline import read_baseline
from gradparity.ci.expectations import read_expectations
from gradparity.conformance.__main__ import main
from gradparity.conformance.aliases import LAWS as OLD_LAWS
from gradparity.conformance.aliases import RECIPES as OLD_RECIPES
from gradparity.conformance.aliases import current_id, current_law
from gradparity.conformance.cli.arguments import parse
from gradparity.conformance.judge import laws as laws
from gradparity.conformance.judge.law import LAWS
from gradparity.conformance.report.records import SCHEMA_VERSION, read_report
from gradparity.conformance.space.recipes import RECIPES
from gradparity.conformance.space.scenario import Scenario

ROOT = Path(__file__).parents[2]
OLD = "fsdp/4/fp32/adam/none/data=text,steps=4,order=reversed,magnitude=0.5"
NEW = "fsdp/4/fp32/adam/none/model=text,steps=4,param-order=reversed,loss-factor=0.5"
MOVED = "fsdp/4/fp32/sgd/none/steps=4,recipe=resume-{}"
HEADER = {
    "kind": "header", "schema": 1, "gradparity": "0", "torch": "2", "python": "3",
    "platform": "linux", "backend": "gloo", "device": "cpu", "threads": 1,
    "commit": "", "command": "", "preset": "quick", "seed": 0, "started": "",
    "planned": 1, "data": {"text": "0"}, "environment": {},
    "laws": {"skip.frozen": {"text": "a", "reason": "b"}},
}  # fmt: skip
CASE = {
    "kind": "case", "scaler": "a:B", "scenario": OLD, "topology": "fsdp", "world": 4,
    "precision": "fp32", "data": "text", "status": "fail", "seconds": 1.0,
    "verdicts": [{"law": "skip.nobody-steps", "status": "fail", "message": "m"}],
}  # fmt: skip
FOOTER = {
    "kind": "footer", "complete": True, "cases": 1, "counts": {"fail": 1},
    "seconds": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [(OLD, NEW), (MOVED.format("elsewhere"), MOVED.format("resharded"))],
)
def test_an_old_id_is_the_same_scenario(old: str, new: str) -> None:
    assert Scenario.parse(old) == Scenario.parse(new)
    assert Scenario.parse(old).id == current_id(old) == new
    assert current_id(new) == new


def test_old_names_lead_to_what_there_is() -> None:
    assert set(OLD_LAWS.values()) <= LAWS.keys() and not OLD_LAWS.keys() & LAWS.keys()
    assert set(OLD_RECIPES.values()) <= RECIPES.keys()
    assert current_law("scale.rule") == "scale.rule"


def test_a_report_of_the_first_schema_is_read(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in (HEADER, CASE, FOOTER)))
    report = read_report(path)
    (case,) = report.cases
    assert report.header.schema == SCHEMA_VERSION
    assert list(report.header.laws) == ["skip.no-side-effects"]
    assert (case.scenario, case.world_size, case.model) == (NEW, 4, "text")
    assert [v.law for v in case.verdicts] == ["skip.all-ranks-skip"]


def test_a_baseline_of_old_names_is_read() -> None:
    (path,) = (ROOT / "ci" / "baselines").glob("*.jsonl")
    for case in read_baseline(path).cases:
        assert Scenario.parse(case.scenario).id == case.scenario
        assert set(case.exact.laws) <= LAWS.keys()
        assert set(case.exact.compared) | set(case.exact.not_compared) <= LAWS.keys()


def test_expectations_of_old_names_are_read(tmp_path: Path) -> None:
    path = tmp_path / "expect.toml"
    entry = 'reason = "r"\nscenario = "*/data=text*"\nlaw = "skip.frozen"\nworld = 4'
    path.write_text(f"[[expect]]\n{entry}\n")
    (found,) = read_expectations(path)
    assert (found.scenario, found.law) == ("*/model=text*", "skip.no-side-effects")
    assert found.world_size == 4


def test_old_options_and_commands_are_parsed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parse(["run", "--data", "text", "--model", "digits"]).model == [
        "text",
        "digits",
    ]
    old, new = (
        parse([*words, "--history", "step", "--budget", "5s", "--world-size", "3"])
        for words in (["machine"], ["hunt", "--calls"])
    )
    for name in ("history", "budget", "world_size", "scaler", "family"):
        assert getattr(old, name) == getattr(new, name)
    assert main(["list", "data"]) == main(["list", "models"]) == 0
    first, second = capsys.readouterr().out.split("digits ")[1:]
    assert first.splitlines()[1:] == second.splitlines()[1:]
    assert main(["explain", "skip.frozen"]) == 0
    assert capsys.readouterr().out.startswith("skip.no-side-effects")


def test_old_names_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["run", "--help"], ["list", "--help"]):
        with pytest.raises(SystemExit):
            parse(words)
    shown = capsys.readouterr().out
    assert "machine" not in shown and "--data" not in shown and "|data|" not in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--family", "gan"], "--family is about call histories: add --calls"),
        (["--calls", "--topology", "ddp"], "--topology is about scenarios"),
        (["--calls", "--quick"], "--preset is about scenarios"),
    ],
)
def test_hunt_refuses_what_its_search_does_not_heed(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hunt", *options]) == 2
    assert words in capsys.readouterr().err
