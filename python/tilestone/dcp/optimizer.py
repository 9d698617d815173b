"""torch.distributed.checkpoint.optimizer itself, which needs nothing from Tilestone."""

import sys
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import optimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.optimizer import *  # noqa: F403

sys.modules[__name__] = optimizer
