"""torch.distributed.checkpoint.staging itself, which needs nothing from Tilestone."""

import sys
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import staging

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import *  # noqa: F403

sys.modules[__name__] = staging
