"""torch.distributed.checkpoint.hf_storage itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.hf_storage import *  # noqa: F403

sys.modules[__name__] = hf_storage
