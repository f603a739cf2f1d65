"""Survey of the models of transformers: runs, continuation, and reports."""

import ast
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from gradparity.benchmarks.validation.survey import catalogue, comparing, survey
from gradparity.benchmarks.validation.survey.__main__ import main
from gradparity.benchmarks.validation.survey.catalogue import ModelType, chosen_types
from gradparity.benchmarks.validation.survey.findings import (
    confirmed,
    families,
    script,
    write_finding,
)
from gradparity.benchmarks.validation.survey.page import render
from gradparity.benchmarks.validation.survey.records import (
    LOADED,
    WEIGHTS,
    Header,
    ModelRecord,
    Rule,
    Run,
    ScriptRecord,
    Survey,
    append,
    read_survey,
)
from gradparity.benchmarks.validation.survey.script import SYNC_LAST
from gradparity.benchmarks.validation.survey.survey import Checking, finished
from gradparity.benchmarks.validation.wild import frame
from gradparity.conformance.status import UsageError
from gradparity.multiprocess import RankOutcome, RankState, WorldError

HEADER = Header(
    package="transformers",
    version="5.23.0",
    torch="2.13.0",
    python="3.11",
    gradparity="0.1.0",
    machine="2 cores",
    command="gradparity bench survey",
    started="2026-11-22T10:00:00+00:00",
    limit_s=60.0,
)
HOOK = Rule(style="summed", where="Summed (pkg/plan.py:3)", module="Norm")
KIND = ModelType(
    name="made_up", folder="made_up", configuration="", config="", rules=frozenset()
)
Q_NORM = "model.layers.0.self_attn.q_norm.weight"


def record(
    name: str, *runs: Run, verdict: str = "wrong", plan: str = "tp"
) -> ModelRecord:
    return ModelRecord(
        plan=plan,
        model=name,
        folder=name,
        verdict=verdict,
        runs=runs,
        rules={"model.layers.*.self_attn.q_norm.weight": HOOK},
    )


def wrong(name: str, **departed: float) -> Run:
    return Run(
        name=name,
        scenario="",
        status="fail",
        parameter=Q_NORM,
        error=max(departed.values()),
        departed=departed,
    )


def test_failures_of_one_rule_are_one_family() -> None:
    """Failures that need accumulation are one family, and other failures another."""
    one = record("qwen3", wrong("2 equal micro-batches", **{Q_NORM: 0.8}))
    other = record("olmo2", wrong("3 unequal micro-batches", **{Q_NORM: 0.7}))
    beside = record("qwen3", wrong("2 equal micro-batches", **{Q_NORM: 0.8}), plan="ep")
    always = record("flint", wrong("1 micro-batch", **{Q_NORM: 0.5}))
    # one wrong gradient changes the norm by which all of them are clipped
    followed = wrong("1 micro-batch, clipped", **{Q_NORM: 0.5, "lm_head.weight": 0.1})
    found = families(
        Survey(
            headers=(HEADER,),
            models=(beside, one, other, record("cwm", *always.runs, followed)),
        )
    )
    assert {(f.id, *f.names) for f in found} == {
        ("transformers-tp-summed-accumulation", "qwen3", "olmo2", "qwen3 (ep)"),
        ("transformers-tp-summed", "cwm"),
    }


def test_a_finding_needs_a_script_that_shows_it(tmp_path: Path) -> None:
    failed = record("made_up", wrong("1 micro-batch", **{Q_NORM: 0.5}))
    whole = Survey(headers=(HEADER,), models=(failed,))
    (family,) = families(whole)
    assert write_finding(family, whole, tmp_path) is None
    said = ScriptRecord(
        finding=family.id, plan="tp", model="made_up", shows=False, text=""
    )
    whole = Survey(headers=(HEADER,), models=(failed,), scripts=(said,))
    assert write_finding(family, whole, tmp_path) is None
    assert not [*tmp_path.iterdir()]


def test_a_survey_that_was_killed_in_a_line_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "survey.jsonl"
    append(path, HEADER)
    append(path, record("qwen3", verdict="right"))
    with path.open("ab") as file:
        file.write(b'{"kind": "model", "pl')
    assert [m.model for m in read_survey(path).models] == ["qwen3"]
    append(path, record("olmo2", verdict="right"))
    assert [m.model for m in read_survey(path).models] == ["qwen3", "olmo2"]
    path.write_bytes(b"no record\n")
    with pytest.raises(UsageError, match=r"line 1: no record"):
        read_survey(path)


def test_weights_loaded_wrong_are_one_failure() -> None:
    """Wrong gradients that follow from wrong weights are not reported again."""
    gate = "model.layers.0.mlp.gate_proj.weight"
    loaded = wrong(LOADED, **{Q_NORM: 1.4, gate: 1.0})
    loaded = msgspec.structs.replace(loaded, law=WEIGHTS)
    model = record("cwm", loaded)
    other = msgspec.structs.replace(HOOK, style="colwise")
    rules = model.rules | {"model.layers.*.mlp.gate_proj.weight": other}
    model = msgspec.structs.replace(model, rules=rules)
    (family,) = families(Survey(headers=(HEADER,), models=(model,)))
    assert family.misloads
    assert [f.parameter for f in family.failures] == [Q_NORM]


@pytest.mark.parametrize(
    ("ended", "verdict"),
    [
        ("hung", "too slow"),
        ("killed", "crashed"),
        ("exited", "crashed"),
        ("raised", "raises"),
        ("", "raises"),
    ],
)
def test_the_verdict_follows_the_exit_of_a_rank_not_its_message(
    ended: str, verdict: str
) -> None:
    from gradparity.benchmarks.validation.survey.comparing import _verdict

    said = Run(
        name="", scenario="", status="error", message="it hung, killed", ended=ended
    )
    right = Run(name="", scenario="", status="pass")
    assert _verdict([right, said]) == verdict
    assert _verdict([right]) == "right"
    assert _verdict([]) == "undecided"


def _dies(pipe: Connection, log: str, limit_s: float) -> None:
    pipe.send_bytes(b"ready")
    pipe.recv_bytes()
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs(pipe: Connection, log: str, limit_s: float) -> None:
    pipe.send_bytes(b"ready")
    pipe.recv_bytes()
    signal.pause()


@pytest.mark.parametrize(
    ("child", "limit_s", "verdict", "reason"),
    [
        (_dies, 60.0, "crashed", "ended with exit code -9"),
        (_hangs, 0.1, "too slow", "not checked within 0.1 s"),
    ],
)
def test_a_model_whose_process_dies_or_hangs_is_reported(
    child: object,
    limit_s: float,
    verdict: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(survey, "_serve", child)
    monkeypatch.setattr(survey, "GRACE_S", 0.0)
    forked = multiprocessing.get_context("fork")  # a spawned one would import torch
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forked)
    with Checking(tmp_path / "log", limit_s) as checking:
        for _ in range(2):  # the next model has a child of its own
            checking.begin("tp", KIND)
            records: list[ModelRecord] = []
            while not records:  # the child's start is an answer, too
                records += finished([checking])
            (found,) = records
            assert (found.verdict, found.model) == (verdict, "made_up")
            assert reason in found.reason


def _answers(pipe: Connection, log: str, limit_s: float) -> None:
    pipe.send_bytes(survey.READY)
    plan, name = json.loads(pipe.recv_bytes())
    right = record(name, plan=plan, verdict="right")
    pipe.send_bytes(msgspec.json.encode(right))
    signal.pause()


def test_a_model_that_hangs_does_not_delay_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forked)
    with Checking(tmp_path / "a", 600) as late, Checking(tmp_path / "b", 600) as other:
        monkeypatch.setattr(survey, "_serve", _hangs)
        late.begin("tp", KIND)
        monkeypatch.setattr(survey, "_serve", _answers)
        other.begin("ep", KIND)
        records: list[ModelRecord] = []
        while not records:
            records += finished([late, other])
        assert [(r.plan, r.verdict) for r in records] == [("ep", "right")]
        assert late.busy and not other.busy


def test_a_request_for_fp32_gives_fp64() -> None:
    """The dtype may be given by position or by name, or by a method like ``float``."""
    from gradparity.benchmarks.validation.survey.zoo import AtLeastDouble

    wide = torch.ones(2, dtype=torch.float64)
    with AtLeastDouble():
        found = (
            wide.to(torch.float32),
            wide.float(),
            torch.softmax(wide, 0, torch.float32),
            torch.softmax(wide, 0, dtype=torch.float32),
        )
    assert {each.dtype for each in found} == {torch.float64}


def test_a_mesh_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradparity.benchmarks.validation.survey import zoo

    monkeypatch.setattr(zoo, "init_device_mesh", lambda *_, **__: object())
    monkeypatch.setattr(zoo, "_known_mesh", cache(zoo._known_mesh.__wrapped__))
    first, again = (
        zoo._mesh_made_once("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        for _ in range(2)
    )
    other = zoo._mesh_made_once("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    assert first is again and other is not first


def test_without_the_package_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue.model_types.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    catalogue.model_types.cache_clear()


needs_transformers = pytest.mark.extras("transformers")


@needs_transformers
@pytest.mark.parametrize(
    "options",
    [["--model", "nobody"], ["--plan", "pp"], ["--limit", "0"], ["--jobs", "0"]],
)
def test_bad_usage_is_one_line(
    options: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    try:
        code: object = main(["--out", str(out), *options])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not out.exists()


@needs_transformers
def test_the_catalogue_is_that_of_the_package() -> None:
    names = {plan: {k.name for k in chosen_types(plan)} for plan in ("tp", "ep")}
    assert {"qwen3", "mixtral", "gemma3_text"} <= names["tp"]
    assert "mixtral" in names["ep"] and "qwen3" not in names["ep"]
    assert "qwen3_5_text" not in names["ep"]  # ``base_model_ep_plan = None``


@needs_transformers
def test_the_plans_of_a_model_are_run_in_turn(tmp_path: Path) -> None:
    """Plans of one model share references, and only few references are kept."""
    settings = survey.SurveySettings(
        plans=("tp", "ep", "fsdp+tp"), names=("qwen3_moe", "mixtral"), out=tmp_path
    )
    plans = ["fsdp+tp", "ep", "tp"]
    due = [(plan, name) for name in ("mixtral", "qwen3_moe") for plan in plans]
    assert [(plan, kind.name) for plan, kind in settings.chosen()] == due


@needs_transformers
@pytest.mark.slow
def test_the_survey_fails_wrong_models_and_shows_each(tmp_path: Path) -> None:
    """A second run of the command skips models that have a record.

    The checkpoint of ``hrm_text`` fuses projections, which are loaded wrong. The
    command runs the script of each finding.
    """
    out = tmp_path / "out"
    command = ["--plan", "tp", "--out", str(out), "--limit", "300", "--quiet"]
    command += ["--model", "qwen3", "hrm_text"]
    assert main(command) == 1
    whole = read_survey(out / "survey.jsonl")
    # they are checked beside each other
    models = {m.model: m for m in whole.models}
    assert {name: m.verdict for name, m in models.items()} == {
        "qwen3": "wrong",
        "hrm_text": "wrong",
    }
    assert [run.name for run in models["hrm_text"].runs] == [LOADED]
    assert len(models["hrm_text"].runs[0].departed) == 24
    assert "`qwen3` | wrong |  | pass | pass | fail | fail | skipped |" in render(whole)
    accumulating, misloading = sorted(families(whole), key=lambda f: f.misloads)
    assert misloading.misloads and accumulating.accumulates
    assert accumulating.rule.style == "replicated_with_grad_allreduce"
    assert {(s.model, s.shows) for s in whole.scripts} == {
        ("qwen3", True),
        ("hrm_text", True),
    }
    scripts = [*(out / "findings").glob("*.py")]
    assert len(scripts) == 2
    for each in scripts:
        is_short_and_needs_nothing_of_ours(each.read_text())
    assert main(command) == 1
    assert len(read_survey(out / "survey.jsonl").headers) == 1


def is_short_and_needs_nothing_of_ours(text: str) -> None:
    assert len(text.replace(frame(), "").splitlines()) <= 80
    assert max(map(len, text.splitlines())) <= 88
    packages = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [
            *([node.module or ""] if isinstance(node, ast.ImportFrom) else []),
            *([a.name for a in node.names] if isinstance(node, ast.Import) else []),
        ]
    }
    assert packages - sys.stdlib_module_names == {"torch", "transformers"}


@needs_transformers
@pytest.mark.slow
def test_a_script_shows_nothing_where_nothing_is(tmp_path: Path) -> None:
    parameter = "model.layers.0.self_attn.q_proj.weight"
    failed = record("qwen2", wrong("2 equal micro-batches", **{parameter: 0.8}))
    rules = {parameter.replace(".0.", ".*."): HOOK}
    failed = msgspec.structs.replace(failed, rules=rules)
    (family,) = families(Survey(headers=(HEADER,), models=(failed,)))
    file = tmp_path / "finding.py"
    file.write_text(script(family.first, "A title", HEADER))
    shows, text = confirmed(file)
    assert not shows, text
    assert text.count("off by") == 2


@needs_transformers
@pytest.mark.slow
def test_models_share_ranks_of_two_axes(tmp_path: Path) -> None:
    """The first model orders the parts of a DTensor differently, and is right."""
    out = tmp_path / "out"
    command = ["--plan", "fsdp+tp", "--out", str(out)]
    command += ["--no-scripts", "--limit", "300", "--quiet", "--jobs", "1"]
    assert main([*command, "--model", "inkling2_text", "qwen3"]) == 1
    right, wrong = read_survey(out / "survey.jsonl").models
    assert (right.model, right.verdict) == ("inkling2_text", "right")
    assert [r.name for r in wrong.runs if r.status == "fail"] == [SYNC_LAST]


def test_one_plan_is_run_again_and_all_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradparity.benchmarks.validation.survey import __main__ as tool

    record, work, pages = (tmp_path / name for name in ("old.jsonl", "work", "pages"))
    record.write_text('{"kind":"header"}\n{"plan":"tp"}\n{"plan":"ep"}\n')
    monkeypatch.setattr(tool, "RECORD", record)
    monkeypatch.setattr(tool, "WORK", work)
    monkeypatch.setattr(tool, "PAGES", pages)
    monkeypatch.setattr(tool, "FINDINGS", tmp_path)
    monkeypatch.setattr(tool, "write_pages", lambda: None)
    tool._begin([])
    assert not work.exists()
    tool._begin(["ep"])
    begun = work / "survey.jsonl"
    assert begun.read_text() == '{"kind":"header"}\n{"plan":"tp"}\n'
    for path in (pages, work / "found"):
        path.mkdir()
    for name in ("found/a.py", "found/a.json", "page.md"):
        (work / name).write_text(name)
    tool._begin(["tp"])  # the same command goes on
    tool._keep(begun, work / "page.md", work / "found")
    assert record.read_text() == begun.read_text()
    assert {path.name for path in pages.iterdir()} == {"a.py", "page.md"}
    assert (tmp_path / "a.json").read_text() == "found/a.json"


def test_an_error_while_loading_is_a_run() -> None:
    """A failed load is recorded, because training from other weights may still pass."""

    class Place:
        def ranks(self, world: int) -> Any:
            return self

        def run(self, *_: object) -> object:
            hung = RankOutcome(rank=0, state=RankState.HUNG)
            raise WorldError((hung,), hung)

    (run,) = comparing._misloaded("tp", "llama", cast(Any, Place()))
    assert (run.name, run.status, run.ended) == (LOADED, "error", "hung")
    assert not run.misloaded
