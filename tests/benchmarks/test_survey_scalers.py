"""The page of known scalers is made from reports and agrees with them."""

import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import gradparity
from gradparity.benchmarks.validation.survey_scalers import main, render
from gradparity.benchmarks.validation.survey_scalers_run import (
    OURS,
    Record,
    check_peers,
    not_checked,
)
from gradparity.conformance import LAWS, Scenario
from gradparity.conformance.run.launcher import Place
from gradparity.conformance.run.session import RunSettings
from gradparity.fixtures.peers import PEERS
from gradparity.tests.ci.test_samples import case, report_of, verdict, with_verdict

PAGE = Path(gradparity.__file__).parent / "docs" / "known-scalers.md"
TORCH = PEERS["torch"].spec
LARGE, SMALL = "fsdp+tp/4/fp32/sgd/none", "tp/2/fp32/sgd/none"


def record() -> Record:
    """Record: torch fails two cases, Lightning none, fairscale the smoke run."""
    bad = verdict("scale.rule", "fail", "got | 3 <b>")
    failed = [with_verdict(case(each, TORCH), bad) for each in (LARGE, SMALL)]
    right = [case(each, OURS) for each in (LARGE, SMALL)]
    lightning = PEERS["lightning"].spec
    fallen = verdict("liveness.completes", "fail", "no CUDA")
    smoke = with_verdict(case(SMALL, PEERS["fairscale"].spec), fallen)
    return Record(
        versions={"torch": "2.13.0", "pytorch-lightning": "2.6", "fairscale": "0.4"},
        smoke=report_of([smoke]),
        run=report_of([*right, *failed, case(SMALL, lightning)]),
    )


def test_the_page_says_what_the_reports_say() -> None:
    page = render(record())
    assert f"| **ours**: `GradScaler` |  | 2 | 0 | 0 | `{OURS}` |" in page
    assert f"| torch 2.13.0 | 0 | 2 | 0 | `{TORCH}` |" in page
    lightning = PEERS["lightning"].spec
    assert f"| pytorch-lightning 2.6 | 1 | 0 | 0 | `{lightning}` |" in page
    # no column for a scaler without a failure
    assert "| check | torch |\n|---|---|\n| `scale.rule` | 2 |\n\n" in page
    # the smaller of two examples, and nothing that Markdown or HTML would read
    assert f"| `scale.rule` | torch | `{SMALL}` | `got \\| 3 <b>` |" in page
    assert "All of them fail there but torch at `scale.rule` (not run)." in page


def test_scalers_that_fail_alike_share_an_example() -> None:
    bad = verdict("scale.rule", "fail", "3")
    specs = [PEERS[name].spec for name in ("torch", "lightning")]
    failed = [with_verdict(case(SMALL, spec), bad) for spec in specs]
    page = render(Record(versions={}, smoke=report_of([]), run=report_of(failed)))
    assert f"| `scale.rule` | torch, lightning | `{SMALL}` | 3 |" in page


def test_the_reason_why_a_scaler_is_not_tested_is_shown() -> None:
    reasons = not_checked(record())
    assert reasons["fairscale"] == f"{SMALL}: no CUDA"
    assert reasons["deepspeed"] == "deepspeed is not installed"
    assert reasons["torch-sharded"] == "not asked for"
    assert "not checked: deepspeed is not installed" in render(record())


def test_a_run_that_was_cut_off_says_so() -> None:
    whole = record()
    cut = msgspec.structs.replace(whole.run, footer=None)
    page = render(Record(versions={}, smoke=whole.smoke, run=cut))
    assert "**Incomplete:**" in page


@pytest.mark.slow
def test_smoke_runs_first_then_the_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(settings: RunSettings, place: Place) -> list[Scenario]:
        # a rank chooses, and knows no preset of a test's
        if settings.scenarios:
            return real(settings, place)
        return [Scenario.parse("tp/2/fp32/sgd/none/steps=2")]

    real = RunSettings.chosen
    monkeypatch.setattr(RunSettings, "chosen", chosen)
    found = check_peers(tmp_path, ["torch"], "quick", Console(quiet=True))
    assert {c.scaler for c in found.smoke.cases} == {OURS, TORCH}
    assert {c.status for c in found.smoke.cases} == {"pass"}
    assert [(c.scaler, c.status) for c in found.run.cases] == [
        (OURS, "pass"),
        (TORCH, "fail"),  # plain tensors beside DTensors: it raises
    ]
    # the violation shows without any harness, by a script that is kept
    (story,) = found.confirmed
    assert (story.law, story.confirmed) == ("liveness.completes", True)
    assert len(list((tmp_path / "scripts").glob("amp-GradScaler-*.py"))) == 1
    out = tmp_path / "page.md"
    assert main(["--render", "--reports", str(tmp_path), "--out", str(out)]) == 0
    assert out.read_text() == render(found)


@pytest.mark.parametrize(
    "options", [["--render", "--reports", "nowhere"], ["--peer", "nobody"]]
)
def test_bad_usage_exits_with_2_without_a_traceback(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_page_in_the_docs_is_not_stale() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in PEERS:
        assert f"**{name}**" in text
    rows = re.findall(r"^\| `([a-z.-]+)` \| [a-z, -]+ \| `(.+?)` \|", text, re.M)
    assert rows
    for law, scenario in rows:
        assert law in LAWS
        assert Scenario.parse(scenario).id == scenario
