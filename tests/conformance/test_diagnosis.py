"""Diagnosis: every cause that explains a factor is listed, and no other."""

import pytest

from gradparity.conformance.judge.diagnosis import Facts, causes_of

PLAIN = Facts(axes={"dp": 2, "tp": 4}, passes=2, scales=(1024.0, 512.0))
CLIPPED = Facts(axes={"dp": 1}, passes=1, scales=(8.0,), clip_norm=0.5, norm=2.0)
NEVER_MEANT = Facts(axes={"dp": 1}, passes=1)


@pytest.mark.parametrize(
    ("facts", "factor", "causes"),
    [
        (
            PLAIN,
            0.5,
            [
                "averaged once too often over dp (2 ranks)",
                "divided twice by the 2 micro-batches",
                "scaled by 512, and divided by 1024",
            ],
        ),
        (PLAIN, 0.25, ["averaged once too often over tp (4 ranks)"]),
        (PLAIN, 0.125, ["averaged once too often over all 8 ranks"]),
        (
            PLAIN,
            2.0,
            [
                "added up where they are to be averaged over dp (2 ranks)",
                "not divided by the 2 micro-batches",
                "divided by the scale 512 of the step before, not 1024",
            ],
        ),
        (PLAIN, 1024.0, ["not divided by the scale 1024"]),
        (PLAIN, 1 / 1024, ["divided twice by the scale 1024"]),
        (
            CLIPPED,
            0.125,
            [
                "divided twice by the scale 8",
                "clipped before they were divided by the scale 8",
            ],
        ),
        (CLIPPED, 4.0, ["not clipped"]),
        (PLAIN, 0.3, []),
        (PLAIN, 1.0005, []),
        (PLAIN, float("nan"), []),
        (NEVER_MEANT, 2.0, []),
    ],
)
def test_all_causes_of_a_factor_are_listed(
    facts: Facts, factor: float, causes: list[str]
) -> None:
    assert causes_of(factor, 1e-3, facts) == ", or ".join(causes)
