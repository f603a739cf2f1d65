"""A scaler under test is refused if it lacks a required method or argument."""

from pathlib import Path
from typing import Any

import pytest

from gradparity.conformance.__main__ import main
from gradparity.conformance.rank.scaler_spec import (
    CONSTRUCTOR,
    METHODS,
    growth_tracker,
    lacking,
    load_scaler,
)
from gradparity.fixtures.faulty import FAULTY, RIGHT

SETTINGS = "device, init_scale, growth_factor, backoff_factor, growth_interval, enabled"
UNFIT = f"""
from gradparity.fixtures.faulty import PlainScaler

class NoUnscale(PlainScaler):
    unscale_ = None

class Raises(PlainScaler):
    def __init__(self, **settings):
        raise RuntimeError("no such device")

class NotInstalled(PlainScaler):
    def __init__(self, **settings):
        import no_such_package

class OtherNames:
    def __init__(self, initial=1.0): ...

class Dies(PlainScaler):
    def __init__(self, **settings):
        import os
        os._exit(7)

def factory({SETTINGS}):
    return PlainScaler(device, init_scale)
"""
REFUSED = {
    "os:getcwd": "unexpected keyword argument 'device'",
    "unfit:OtherNames": "unexpected keyword argument 'device'",
    "unfit:NoUnscale": "has no method unscale_",
    "unfit:Raises": "cannot be constructed: RuntimeError: no such device",
    "unfit:NotInstalled": "No module named 'no_such_package': install it",
    "unfit:Dies": "cannot be constructed: rank 0",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "unfit.py").write_text(UNFIT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("spec", REFUSED)
@pytest.mark.parametrize(
    "command", ["run --preset parity", "replay single/1/fp32/sgd/none", "hunt"]
)
def test_a_scaler_that_does_not_offer_it_is_refused_once_before_the_runs(
    folder: Path, spec: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--scaler", spec]) == 2
    told = capsys.readouterr().err.splitlines()
    lines = [line for line in told if line.startswith("gradparity: ")]
    assert len(lines) == 1, told
    assert spec in lines[0] and REFUSED[spec] in lines[0]
    assert "docs/check-a-scaler.md" in lines[0]
    assert not list(folder.glob("parity-*"))


@pytest.mark.usefixtures("folder")
def test_a_factory_and_every_scaler_of_ours_offer_it() -> None:
    assert lacking("unfit:factory", ".", "cpu") == ""
    assert lacking("torch.amp:GradScaler", ".", "cpu") == ""
    for scaler in [*FAULTY, *RIGHT]:
        found = load_scaler(f"gradparity.fixtures.faulty:{scaler.__name__}", ".")
        assert found is scaler


def test_the_page_says_what_the_code_says() -> None:
    import gradparity

    page = Path(gradparity.__file__).parent / "docs" / "check-a-scaler.md"
    text = page.read_text(encoding="utf-8")
    for name in [*CONSTRUCTOR, *METHODS]:
        assert f"`{name}" in text, name


@pytest.mark.parametrize(
    ("state", "tracker"),
    [({}, None), ({"_growth_tracker": 3}, 3), ({"_growth_tracker": None}, None)],
)
def test_a_growth_tracker_is_optional(state: dict[str, Any], tracker: object) -> None:
    assert growth_tracker(state) == tracker
