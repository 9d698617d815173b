"""torch.distributed.checkpoint.default_planner itself, which needs nothing from Tilestone."""

import sys
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import default_planner

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import *  # noqa: F403

sys.modules[__name__] = default_planner
