"""torch.distributed.checkpoint.logger itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import logger
from torch.distributed.checkpoint.logger import *  # noqa: F403

sys.modules[__name__] = logger
