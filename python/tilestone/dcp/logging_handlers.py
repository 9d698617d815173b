"""torch.distributed.checkpoint.logging_handlers itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import logging_handlers
from torch.distributed.checkpoint.logging_handlers import *  # noqa: F403

sys.modules[__name__] = logging_handlers
