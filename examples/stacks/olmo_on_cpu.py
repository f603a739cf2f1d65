"""Stand-ins for OLMo-core's cloud clients and trainer, which the workloads lack.

Not a stack to run. docs/stacks.md has the reasons.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)


def local(path: str, **settings: Any) -> Path:
    """Return the path, as cached_path does for a path that is not a URL."""
    return Path(path)


# cached_path asks for rich 13, boto3 and Google's clients: names take its place.
NAMES = "SchemeClient S3Client add_scheme_client".split()
CLIENT = type("Client", (), {"recoverable_errors": ()})
for name in ("cached_path", "cached_path.schemes"):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(dict.fromkeys(NAMES, CLIENT), cached_path=local)


class Metrics:
    """Stand-in for the trainer: keeps what the train module records."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def record_metric(self, name: str, value: Any, **settings: Any) -> None:
        self.found[name] = value

    def record_ce_loss(self, value: Any, **settings: Any) -> None:
        self.record_metric("loss", value)


def another_mesh() -> None:
    """Forget the mesh of the last run: OLMo-core creates one mesh in a process."""
    from olmo_core.distributed import parallel

    parallel._WORLD_MESH = None


def load_whole(module: Any, weights: dict[str, Any]) -> None:
    """Load the given weights in place of those that the train module initialised."""
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(module.model, weights, options=whole)
