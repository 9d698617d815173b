"""torch.distributed.checkpoint.planner_helpers itself, which needs nothing from Tilestone."""

import sys
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import planner_helpers

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner_helpers import *  # noqa: F403

sys.modules[__name__] = planner_helpers
