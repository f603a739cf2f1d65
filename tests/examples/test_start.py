"""Steps of docs/start.md: copy a workload, run it, break it, and run it again."""

from pathlib import Path

import pytest

import gradparity
from gradparity.conformance.__main__ import main

EXAMPLE = Path(gradparity.__file__).parent / "examples" / "workload.py"
RUN = ["run", "--quick", "--scaler", "none", "--topology", "dp2", "--precision", "fp32"]
SHARDS = "        fully_shard("


@pytest.mark.parametrize(
    ("before", "code"), [("", 0), ('if mesh["dp"].size() < 2:', 1)]
)
@pytest.mark.few(1)
def test_a_copied_workload_passes_and_fails_once_broken(
    before: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"start_{code}"  # a module is imported once
    text = EXAMPLE.read_text()
    assert SHARDS in text
    if before:
        text = text.replace(SHARDS, f"        {before}\n            fully_shard(")
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main([*RUN, "--fail-fast", "--workload", f"{name}:Stack"]) == code
    assert ("FAIL" if code else "PASS") in capsys.readouterr().out
