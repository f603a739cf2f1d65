"""Results of a compared case, as tests ask for them."""

from gradparity.conformance import Case


def failed(found: Case) -> dict[str, str]:
    """Return the message of each check that failed, by the check's id."""
    return {v.law: v.message for v in found.verdicts if v.status == "fail"}
