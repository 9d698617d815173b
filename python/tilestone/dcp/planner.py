"""torch.distributed.checkpoint.planner itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.planner import *  # noqa: F403

sys.modules[__name__] = planner
