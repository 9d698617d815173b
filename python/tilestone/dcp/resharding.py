"""torch.distributed.checkpoint.resharding itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import resharding
from torch.distributed.checkpoint.resharding import *  # noqa: F403

sys.modules[__name__] = resharding
