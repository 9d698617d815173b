"""torch.distributed.checkpoint.planner_helpers itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.planner_helpers import *  # noqa: F403

sys.modules[__name__] = planner_helpers
