"""torch.distributed.checkpoint.stateful itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import stateful
from torch.distributed.checkpoint.stateful import *  # noqa: F403

sys.modules[__name__] = stateful
