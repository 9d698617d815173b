"""torch.distributed.checkpoint.stateful itself, which needs nothing from Tilestone."""

import sys
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import stateful

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import *  # noqa: F403

sys.modules[__name__] = stateful
