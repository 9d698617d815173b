"""torch.distributed.checkpoint.storage itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.storage import *  # noqa: F403

sys.modules[__name__] = storage
