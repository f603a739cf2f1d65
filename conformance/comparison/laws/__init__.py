"""All checks; importing this package fills ``LAWS`` in this order.

If two checks break at one step, the first one is the cause: ranks that disagree take
different steps, and different steps give different weights.
"""

from . import liveness as liveness  # isort: skip
from . import collectives as collectives  # isort: skip
from . import randomness as randomness  # isort: skip
from . import agreement as agreement  # isort: skip
from . import skip as skip  # isort: skip
from . import trainer as trainer  # isort: skip
from . import scale as scale  # isort: skip
from . import transparency as transparency  # isort: skip
from . import reduction as reduction  # isort: skip
from . import norm as norm  # isort: skip
from . import parity as parity  # isort: skip
from . import misuse as misuse  # isort: skip

__all__ = [
    "agreement",
    "collectives",
    "liveness",
    "misuse",
    "norm",
    "parity",
    "randomness",
    "reduction",
    "scale",
    "skip",
    "trainer",
    "transparency",
]
