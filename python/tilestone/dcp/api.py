"""torch.distributed.checkpoint.api itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import api
from torch.distributed.checkpoint.api import *  # noqa: F403

sys.modules[__name__] = api
