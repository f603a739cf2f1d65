"""Numbers and names in the docs that follow from the code."""

import argparse
import re

import pytest

from gradparity.conformance.cli.arguments import SUITE
from gradparity.conformance.space.catalogue import Selection, select
from gradparity.fixtures import MODELS, TOPOLOGIES
from gradparity.tests.docs_blocks import ROOT

WORDS = {8: "eight", 7: "seven", 9: "nine"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def row_of(page: str, name: str) -> list[str]:
    """Return the cells of the table row that starts with ``name``."""
    (row,) = re.findall(rf"^\| {re.escape(name)} \|.*\|$", text_of(page), re.M)
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "preset"),
    [("`--quick`", "quick"), ("default", "default"), ("`--full`", "full")],
)
def test_the_size_of_each_preset(name: str, preset: str) -> None:
    count = row_of("docs/catalogue.md", name)[-1]
    assert int(count) == len(list(select(preset, Selection())))


@pytest.mark.parametrize(
    ("row", "names"), [("topology", TOPOLOGIES), ("model", MODELS)]
)
def test_the_space_names_all_there_is(row: str, names: dict[str, object]) -> None:
    told = re.sub(r"\([^)]*\)", "", row_of("docs/catalogue.md", row)[1])
    found = {each.strip() for each in told.split(",")}
    assert found == set(names), f"row {row} of docs/catalogue.md: {found ^ set(names)}"


def test_the_main_job() -> None:
    """The table of docs/scaler.md has each topology of ``make parity`` once."""
    topologies = {scenario.topology for scenario in select("parity", Selection())}
    text = text_of("docs/scaler.md")
    assert f"on {WORDS[len(topologies)]} topologies" in " ".join(text.split())
    _, table = text.split("| `torch.amp:GradScaler` |", 1)
    rows = re.findall(r"^\| ([a-z0-9+, ]+) \| pass \|", table, re.M)
    assert sorted(", ".join(rows).split(", ")) == sorted(topologies)


def test_the_options_of_the_plugin() -> None:
    told = set(re.findall(r"`--gradparity-([a-z-]+)", text_of("docs/pytest.md")))
    # a hidden one is an alias
    assert told == {n for n, how in SUITE.items() if how["help"] != argparse.SUPPRESS}
