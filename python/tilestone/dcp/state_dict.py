"""torch.distributed.checkpoint.state_dict itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import *  # noqa: F403

sys.modules[__name__] = state_dict
