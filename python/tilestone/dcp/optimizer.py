"""torch.distributed.checkpoint.optimizer itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import optimizer
from torch.distributed.checkpoint.optimizer import *  # noqa: F403

sys.modules[__name__] = optimizer
