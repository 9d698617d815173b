"""Compares two checkpoints tensor by tensor, in a process that never imports torch.

    read_without_torch.py CKPT OTHER

Prints JSON: the number of compared tensors, how many differ in any bit, the largest difference.
"""

from __future__ import annotations

import json
import sys

import numpy

import tilestone


def main(path: str, other_path: str) -> None:
    differing, largest = 0, 0.0
    with tilestone.open(path) as ckpt, tilestone.open(other_path) as other:
        keys = ckpt.tensor_keys()
        assert keys == other.tensor_keys(), "the keys differ"
        for key in keys:
            a, b = ckpt.read(key), other.read(key)
            differing += a.tobytes() != b.tobytes()
            largest = max(largest, float(numpy.abs(a.astype("f8") - b.astype("f8")).max(initial=0)))
        writers = ckpt.writer, other.writer
    assert "torch" not in sys.modules
    print(json.dumps({"tensors": len(keys), "differing": differing, "delta": largest,
                      "writers": writers}))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
