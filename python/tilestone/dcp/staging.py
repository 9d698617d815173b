"""torch.distributed.checkpoint.staging itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.staging import *  # noqa: F403

sys.modules[__name__] = staging
