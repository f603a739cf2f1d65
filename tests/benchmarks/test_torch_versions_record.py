"""The record of one baseline over versions of torch, and the table made of it."""

import json

from gradparity.benchmarks.validation.torch_versions import PAGE, RESULTS, lines

RECORD = json.loads(RESULTS.read_text())


def test_the_table_is_that_of_the_record() -> None:
    assert "\n".join(lines(RECORD)) in PAGE.read_text()


def test_right_workloads_pass_and_faults_fail_the_gate() -> None:
    others = [v for v in RECORD["versions"] if "2.13" not in v["torch"]]
    assert len(others) >= 2
    for version in others:
        assert version["false_alarms"] == [] and version["outcome"] == "pass"
        assert version["planted"] - len(version["missed"]) >= 30
