"""Names of earlier versions, which still read: laws, and parts of scenario ids.

They are kept for one version. This file imports nothing of ours.
"""

from __future__ import annotations

import re

__all__ = ["current_id", "current_law"]

LAWS = {
    "skip.frozen": "skip.no-side-effects",
    "skip.nobody-steps": "skip.all-ranks-skip",
    "skip.everybody-steps": "skip.all-ranks-step",
}
"""Old id of a law -> its id."""
SETTINGS = {
    "data": "model",
    "order": "param-order",
    "magnitude": "loss-factor",
}
"""Old key in a scenario id -> its key."""
RECIPES = {"resume-elsewhere": "resume-resharded"}
"""Old name of a recipe -> its name."""
_SETTING = re.compile(rf"(?<![\w-])({'|'.join(SETTINGS)})=")
_RECIPE = re.compile(rf"(?<=recipe=)({'|'.join(RECIPES)})(?![\w-])")


def current_id(text: str) -> str:
    """A scenario id, or a pattern for ids, in current names."""
    text = _SETTING.sub(lambda found: f"{SETTINGS[found[1]]}=", text)
    return _RECIPE.sub(lambda found: RECIPES[found[1]], text)


def current_law(law: str) -> str:
    """The current id of a law."""
    return LAWS.get(law, law)
