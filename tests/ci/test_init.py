"""gradparity init: its files run unchanged, and what it cannot find is a TODO."""

import json
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

import gradparity
from gradparity.ci import job
from gradparity.ci.init import main as init
from gradparity.ci.job import Address, address_of_gradparity, job_text, parse_address
from gradparity.conformance import Runner, Scenario
from gradparity.conformance.__main__ import main
from gradparity.conformance.report.records import read_report
from gradparity.tests.ci.test_templates import SCHEMAS
from gradparity.tests.extras import needs
from gradparity.tests.json_schemas import lint

ROOT = Path(gradparity.__file__).parent
HF = needs("transformers")
RUFF = [sys.executable, "-m", "ruff"]
MODELS = '''
import sys

import torch
from torch import nn


class Exits(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        sys.exit(0)


def plain():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def averaged():
    norm = nn.InstanceNorm1d(32, track_running_stats=True)
    shaped = nn.Unflatten(1, (32, 2))
    return nn.Sequential(nn.Linear(16, 64), shaped, norm, nn.Flatten())


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2],
            layer_type="basic", num_labels=4,
        )
    )


class Two(nn.Module):
    """Two inputs of unlike sizes."""

    def __init__(self, width=8):
        super().__init__()
        self.one, self.other = nn.Linear(width, 4), nn.Linear(5, 4)

    def forward(self, left, right):
        return self.one(left) + self.other(right)


class Pair(nn.Module):
    """Takes what no layer shows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, pair):
        return self.layer(pair.left)


class Coupled(Pair):
    """A row's output depends on the other rows."""

    def forward(self, x):
        return self.layer(x - x.mean(0)) * x.std(0).mean()


class Scaled(Pair):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.layer(x) * self.scale


class Routed(nn.Module):
    """Each row goes to one expert."""

    def __init__(self):
        super().__init__()
        self.layer, self.router = nn.Linear(8, 8), nn.Linear(8, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x):
        x = self.layer(x)
        chosen = self.router(torch.sin(40 * x)).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (rows := chosen == number).any():
                out[rows] = expert(x[rows])
        return out


class Recurrent(nn.Module):
    """Layers without children, with four parameters each."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.layers = nn.ModuleList(nn.GRU(8, 8, batch_first=True) for _ in range(2))

    def forward(self, x):
        x = self.first(x)[:, None]
        for layer in self.layers:
            x = layer(x)[0]
        return x[:, 0]


class Sized(nn.Module):
    def __init__(self, width, depth):
        super().__init__()


class Config:
    def __init__(self, width=6):
        self.width = width


class Configured(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(config.width, config.width)) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def raises():
    raise ValueError("no width")


instance, number = nn.Linear(2, 2), 3
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "zoo.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "zoo", raising=False)
    return tmp_path


def is_clean(file: Path) -> bool:
    config = ["--config", str(ROOT / "pyproject.toml")]
    # the protocol says what its methods are; batch norms have no public base
    check = [*RUFF, "check", *config, "--ignore", "D102,SLF001", str(file)]
    tidy = [*RUFF, "format", "--check", *config, str(file)]
    return all(subprocess.run(each).returncode == 0 for each in (check, tidy))


def test_a_script_that_parses_arguments_when_imported_has_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_script.py").write_text("class Model: ...\nraise SystemExit(2)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["init", "a_script:Model"]) == 2
    told = capsys.readouterr().err
    assert "a_script ends the program (SystemExit: 2)" in told
    assert "Put code that a script runs under if __name__" in told


QUICK = ["run", "--quick", "--scaler", "none", "--workload"]
NARROW = ["--topology", "dp2", "--precision", "fp32", "--fail-fast"]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the drafts of all models."""
    folder = tmp_path_factory.mktemp("drafts")
    (folder / "zoo.py").write_text(MODELS)
    return folder


@pytest.fixture(scope="module")
def runner(drafts: Path) -> Iterator[Runner]:
    """Runner for drafts; its ranks import a package once for all of its models."""
    with Runner(folder=str(drafts), timeout_s=200) as made:
        yield made


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # as outside of pytest: packages warn
@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        ("zoo:Two", None),
        ("zoo:averaged", None),
        ("zoo:Recurrent", "layers"),
        pytest.param("zoo:gpt2", "transformer.h", marks=HF),
        pytest.param("zoo:resnet", "resnet.encoder.stages", marks=HF),
        pytest.param("transformers:Qwen3ForCausalLM", "model.layers", marks=HF),
        pytest.param("transformers:ViTForImageClassification", "vit.layers", marks=HF),
        pytest.param(
            "transformers:T5ForConditionalGeneration", "decoder.block", marks=HF
        ),
    ],
)
def test_a_draft_runs_as_it_is_written(
    spec: str,
    blocks: str | None,
    drafts: Path,
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(drafts)
    monkeypatch.syspath_prepend(str(drafts))
    name = f"drafted_{spec.partition(':')[2].lower()}"  # a module is imported once
    file = drafts / f"{name}.py"
    assert main(["init", spec, "--out", file.name]) == 0
    text = file.read_text()
    assert is_clean(file) and "TODO" not in text.partition('"""\n\n')[2]
    assert len(text.splitlines()) < 90
    if blocks is not None:
        assert f'{blocks}"' in text
    for recipe in ("plain", "accumulate"):  # the recipes that --layouts runs
        settings = f"model={name}:Workload,recipe={recipe},steps=3"
        found = runner.run("none", Scenario.parse(f"dp2/2/fp32/own/none/{settings}"))
        assert found.status == "pass", (found.problem, found.verdicts)
        (gradient,) = (v for v in found.verdicts if v.law == "parity.gradient")
        assert gradient.status == "pass" and gradient.compared


@pytest.mark.slow
def test_a_draft_runs_and_a_fault_in_it_is_found(folder: Path) -> None:
    assert main(["init", "zoo:plain", "--out", "first_draft.py"]) == 0
    file = folder / "first_draft.py"
    assert is_clean(file)
    assert main([*QUICK, "first_draft:Workload"]) == 0
    report = read_report(folder / "parity-report" / "report.jsonl")
    gradients = [
        v
        for case in report.cases
        if case.scenario.startswith("dp2/")
        for v in case.verdicts
        if v.law == "parity.gradient" and v.status == "pass"
    ]
    assert gradients and all(v.compared for v in gradients)
    text = file.read_text()
    shard = "        fully_shard(model, mesh=mesh, mp_policy=policy)\n"
    assert shard in text
    (folder / "broken_draft.py").write_text(
        text.replace(shard, "        if mesh.size() < 2:\n    " + shard)
    )
    assert main([*QUICK, "broken_draft:Workload", *NARROW]) == 1


@pytest.mark.parametrize(
    ("spec", "lines"),
    [
        (
            "zoo:Two",
            ["return ByName(model)", '"right": torch.rand(8, 5, generator=generator),'],
        ),
        (
            "zoo:Configured",
            [
                "from zoo import Config, Configured",
                "model: nn.Module = Configured(Config())",
                'for block in model.get_submodule("layers").children():',
            ],
        ),
        pytest.param(
            "zoo:resnet", ["module.eval()", "torch.rand(8, 3, 32, 32,"], marks=HF
        ),
        pytest.param(
            "transformers:BertModel",
            [
                "config = BertConfig(\n            vocab_size=64,",
                "mse_loss(output.last_hid",
            ],
            marks=HF,
        ),
    ],
)
def test_what_one_forward_shows(spec: str, lines: list[str], folder: Path) -> None:
    assert init([spec]) == 0
    text = (folder / "stack.py").read_text()
    assert [line for line in lines if line not in text] == []
    assert is_clean(folder / "stack.py")


@pytest.mark.parametrize(
    ("spec", "todo"),
    [
        ("zoo:Pair", "TODO: no inputs were found: with pair [8, 8] it raised"),
        ("zoo:Coupled", "TODO: gradparity refuses this workload as it is: loss: is"),
        ("zoo:Scaled", "TODO: gradparity refuses this workload as it is: parallelize"),
        ("zoo:Routed", "TODO: gradparity refuses this workload as it is: parallelize"),
    ],
)
def test_what_is_not_found_is_a_todo_and_exit_4(
    spec: str, todo: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"undone_{spec[4:].lower()}"  # a module is imported once
    assert init([spec, "--out", f"{name}.py"]) == 4
    assert f"{name}.py has a TODO: " in capsys.readouterr().out
    assert todo in (folder / f"{name}.py").read_text()
    assert is_clean(folder / f"{name}.py")
    # a layout needs ranks, which would take seconds
    if spec not in ("zoo:Scaled", "zoo:Routed"):
        assert main([*QUICK, f"{name}:Workload"]) == 2  # not checked, and no pass


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["zo:plain"], "cannot import: ModuleNotFoundError: No module named 'zo'"),
        (["zoo:plan"], "has no attribute 'plan'; did you mean plain?"),
        (["zoo"], "is not module:attribute"),
        (["zoo:plain", "--ou", "a.py"], "unknown option --ou; did you mean --out?"),
        (["zoo:plain", "--ci", "gitlb"], "did you mean gitlab?"),
        (["zoo:plain", "--out", "../a.py"], "in this folder or below"),
        (["zoo:plain", "--out", "a.txt"], "expected a Python file"),
        (["zoo:plain", "--out", "torch.py"], "would hide the installed module torch"),
        (["zoo:plain", "--out", "json/a.py"], "would hide the installed module json"),
        (["zoo:plain", "--out", "zoo/a.py"], "zoo.py is a module of this folder"),
        (["zoo:plain", "--source", "https://h/o/n"], "--source goes with --ci"),
        (["zoo:plain", "--ci", "github", "--source", "here"], "is not a repository"),
        (["zoo:plain", "--out", "zoo.py"], "zoo.py exists: choose another name"),
        (["zoo:Sized"], "needs width, depth: write a function without arguments"),
        (["zoo:instance"], "is a model already"),
        (["zoo:number"], "is of type int, expected a function"),
        (["zoo:number"], "`def make_model(): return MyModel(...)`"),
        (["zoo:raises"], "raised ValueError: no width (zoo.py line"),
        (["zoo:Exits"], "zoo:Exits ended the program: exit(0)"),
    ],
)
def test_refused_in_one_line_with_the_way_out(
    arguments: list[str],
    told: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert init(arguments) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert (folder / "zoo.py").read_text() == MODELS
    assert [p.name for p in folder.iterdir() if p.suffix in (".py", ".yml")] == [
        "zoo.py"
    ]


@pytest.mark.parametrize(
    "arguments", [["zoo"], ["zoo:plain", "--out", "zoo.py"], ["zoo:plain", "--ou"]]
)
def test_options_are_refused_before_torch_is_imported(
    arguments: list[str], folder: Path
) -> None:
    code = (
        "import sys; from gradparity.conformance.__main__ import main; "
        f"assert main({['init', *arguments]!r}) == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)


# - The CI job


@pytest.mark.parametrize(
    ("system", "schema"), list(zip(job.FILES, SCHEMAS.values(), strict=True))
)
@pytest.mark.parametrize("project", ["", "pyproject.toml", "requirements.txt"])
def test_the_job_keeps_the_schema_of_its_system(
    system: str, schema: str, project: str, folder: Path
) -> None:
    if project:
        (folder / project).touch()
    source = ["--source", "https://github.com/me/gradparity@v9"]
    assert init(["zoo:plain", "--ci", system, *source]) == 0
    written = folder / job.FILES[system]
    assert lint(written, schema) == (0, "")
    text = written.read_text()
    assert "stack:Workload" in text and "me/gradparity@v9" in text
    assert (" -e ." in text, " -r requirements.txt" in text) == (
        project == "pyproject.toml",
        project == "requirements.txt",
    )
    assert "TODO" not in text
    # a second time nothing is written: the job is there
    assert init(["zoo:plain", "--out", "other.py", "--ci", system]) == 2
    assert not (folder / "other.py").exists()


def test_a_workload_that_there_is_gets_its_job_alone(folder: Path) -> None:
    (folder / "own_stack.py").write_text(
        (ROOT / "examples" / "workload.py").read_text()
    )
    source = ["--source", "git@github.com:me/gradparity.git"]
    assert init(["own_stack:Stack"]) == 2
    assert init(["own_stack:Stack", "--ci", "github", *source]) == 0
    assert not (folder / "stack.py").exists()
    text = (folder / job.FILES["github"]).read_text()
    assert "workload: own_stack:Stack" in text
    assert f"uses: me/gradparity@v{gradparity.__version__}" in text


def test_an_unknown_repository_is_a_todo(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradparity.ci.init.address_of_gradparity", lambda: job.UNKNOWN)
    assert init(["zoo:plain", "--ci", "gitlab"]) == 4
    assert "TODO: put the address" in (folder / job.FILES["gitlab"]).read_text()
    elsewhere = Address(host="git.example.org", path="me/gradparity")
    assert "TODO" in job_text("github", "a:B", elsewhere, "2.13.0")
    assert "TODO" not in job_text("gitlab", "a:B", elsewhere, "2.13.0")


@pytest.mark.parametrize(
    ("text", "url", "revision"),
    [
        ("https://github.com/me/gradparity", "https://github.com/me/gradparity", None),
        ("git@github.com:me/gradparity.git", "https://github.com/me/gradparity", None),
        ("ssh://git@h.org:22/a/b/gradparity@v2", "https://h.org/a/b/gradparity", "v2"),
        ("https://me:secret@h.org:8443/a/g.git", "https://h.org:8443/a/g", None),
    ],
)
def test_addresses_hold_no_secret(text: str, url: str, revision: str | None) -> None:
    found = parse_address(text)
    assert found is not None and found.url == url
    assert found.revision == (revision or f"v{gradparity.__version__}")


@pytest.mark.parametrize(
    "text", ["here", "https://h.org", "https://h.org/a b/c", "file:///a/b", "git@x"]
)
def test_what_is_no_address(text: str) -> None:
    assert parse_address(text) is None


def test_the_address_is_that_of_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def __init__(self, origin: object, urls: dict[str, str]) -> None:
            self.origin = origin
            self.metadata = Message()
            for name, url in urls.items():
                self.metadata["Project-URL"] = f"{name}, {url}"

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return json.dumps(self.origin) if self.origin else None

    def found(origin: object, **urls: str) -> Address:
        def installed(name: str) -> Installed:
            return Installed(origin, urls)

        monkeypatch.setattr(job, "distribution", installed)
        return address_of_gradparity()

    assert found(None) == job.UNKNOWN  # from a wheel that was built by hand
    released = {
        "Changelog": "https://github.com/me/gradparity/blob/v1/CHANGELOG.md",
        "Repository": "https://github.com/me/gradparity",
    }
    assert found(None, **released) == Address(host="github.com", path="me/gradparity")
    vcs = {"vcs": "git", "commit_id": "abc", "requested_revision": "v3"}
    url = "https://github.com/me/gradparity.git"
    expected = Address(host="github.com", path="me/gradparity", revision="v3")
    assert found({"url": url, "vcs_info": vcs}) == expected
    checkout = {"url": tmp_path.as_uri(), "dir_info": {}}
    assert found(checkout) == job.UNKNOWN
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "remote", "add", "origin", url], check=True)
    assert found(checkout) == Address(host="github.com", path="me/gradparity")
