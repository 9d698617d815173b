"""torch.distributed.checkpoint.utils itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import utils
from torch.distributed.checkpoint.utils import *  # noqa: F403

sys.modules[__name__] = utils
