"""Our scaler as it acts on an accelerator: the host reads no tensor to decide."""

from typing import Any

from gradparity.scaler import GradScaler
from gradparity.scaler.grads import Host
from gradparity.scaler.sync import OverflowSync


class Settling(GradScaler):
    """Our scaler in its first iterations, whose rows the host reads at once."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        Host.reads_cpu = False  # for good: the ranks of a test class serve it alone
        super().__init__(*args, **settings)


class Settled(Settling):
    """Our scaler in later iterations, whose rows the host reads at the next sync."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        OverflowSync.settles = 0
        super().__init__(*args, **settings)
