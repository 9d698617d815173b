"""torch.distributed.checkpoint.metadata itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import *  # noqa: F403

sys.modules[__name__] = metadata
