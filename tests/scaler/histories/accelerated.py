"""Our scaler as it acts on an accelerator: the host reads no tensor to decide."""

from typing import Any

from gradparity.scaler import GradScaler
from gradparity.scaler.grads import Host
from gradparity.scaler.sync import OverflowSync


class Settling(GradScaler):
    """First iterations, in which the host reads the exchanged rows."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        Host.reads_cpu = False  # for good: the ranks of a test class serve it alone
        super().__init__(*args, **settings)


class Settled(Settling):
    """The later ones: the host reads that at the next sync."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        OverflowSync.settles = 0
        super().__init__(*args, **settings)
