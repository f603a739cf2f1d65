"""What a judged case came to, as tests ask for it."""

from gradparity.conformance import Case


def failed(found: Case) -> dict[str, str]:
    """Return the message of each check that failed, by its law."""
    return {v.law: v.message for v in found.verdicts if v.status == "fail"}
