"""torch.distributed.checkpoint.quantized_hf_storage itself, which needs nothing from Tilestone."""

import sys

from torch.distributed.checkpoint import quantized_hf_storage
from torch.distributed.checkpoint.quantized_hf_storage import *  # noqa: F403

sys.modules[__name__] = quantized_hf_storage
