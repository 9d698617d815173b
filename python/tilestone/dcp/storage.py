"""torch.distributed.checkpoint.storage itself, which needs nothing from Tilestone."""

import sys
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import storage

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import *  # noqa: F403

sys.modules[__name__] = storage
