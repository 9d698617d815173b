"""Many tensors of an open checkpoint are read together."""

from __future__ import annotations

import numpy
import pytest
import tilestone


def test_many_keys_read_at_once_equal_single_reads(ckpt: str) -> None:
    state = {f"t{i}": numpy.arange(i % 7, dtype="f4") for i in range(200)}
    tilestone.save(state, ckpt)
    opened = tilestone.open(ckpt)
    keys = [f"t{i}" for i in (5, 199, 0, 5, 17)]
    read = opened.read_many(keys)
    assert list(read) == ["t5", "t199", "t0", "t17"]
    for key, array in read.items():
        assert array.dtype == "f4" and (array == opened.read(key)).all()
        assert array.shape == state[key].shape
    assert opened.read_many(opened.tensor_keys()).keys() == state.keys()
    with pytest.raises(tilestone.NotFoundError) as raised:
        opened.read_many(["t1", "u"])
    assert raised.value.key == "u"
    with pytest.raises(tilestone.InvalidArgumentError, match="keys must be a collection of names"):
        opened.read_many("t1")
    assert opened.read_many([]) == {}
