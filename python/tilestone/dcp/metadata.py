"""torch.distributed.checkpoint.metadata itself, which needs nothing from Tilestone."""

import sys
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import metadata

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import *  # noqa: F403

sys.modules[__name__] = metadata
