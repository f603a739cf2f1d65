"""Options of the command line and of pytest lead to the same settings."""

from typing import Any

from gradparity.conformance.chosen import Chosen
from gradparity.conformance.cli.arguments import SUITE, parse

WORDS = [
    *("run", "--scaler", "none", "--topology", "ddp,fsdp", "--world-size", "2"),
    *("--seed", "3", "--timeout-s", "9", "--quick"),
]


def test_the_command_line_and_pytest_choose_alike() -> None:
    parsed = vars(parse(WORDS))
    names = [n for n, how in SUITE.items() if "dest" not in how]
    of_pytest: dict[str, Any] = {n: parsed[n.replace("-", "_")] for n in names}
    found = Chosen.of(parsed)
    assert found == Chosen.of(of_pytest)
    assert (found.scalers, found.topologies) == (("none",), ("ddp", "fsdp"))
    assert (found.world_size, found.seed, found.timeout_s) == (2, 3, 9.0)
    assert found.preset == "quick"


def test_a_command_without_an_option_has_its_default() -> None:
    assert Chosen.of({"scaler": None, "out": "x"}) == Chosen()
