"""The tables of docs/recordings.md equal those made from its records."""

import pytest

from gradparity.benchmarks.recordings_page import PAGE, TABLES


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_page_is_that_of_the_records(name: str) -> None:
    table = "\n".join(TABLES[name]())
    assert table.count("\n") > 2, "a heading and at least two rows"
    assert f"<!-- recorded: {name} -->\n\n{table}\n\n<!-- end -->" in PAGE.read_text()
