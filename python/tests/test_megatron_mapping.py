"""tilestone.megatron's pure modules, beside those of the installed Megatron-Core."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import pathlib
import pickle
import random
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tilestone
import torch
from ranks import Raised, Worlds
from tilestone.megatron import (
    core,
    dict_utils,
    mapping,
    optimizer,
    state_dict_utils,
    utils,
    validation,
)
from tilestone.megatron.core import CheckpointingException
from tilestone.megatron.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from tilestone.megatron.validation import StrictHandling


@pytest.fixture(scope="module")
def stock() -> Any:
    """Megatron-Core's modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import (  # noqa: F401
            dict_utils,
            mapping,
            optimizer,
            state_dict_utils,
            utils,
            validation,
        )
    return dist_checkpointing


def _attributes(entity: Any) -> dict[str, Any]:
    """Comparable between the two libraries."""
    found = dict(vars(entity))
    assert found.pop("holders", None) is None  # ours alone have it
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            found[name] = (value.tolist(), tuple(value.shape))
        elif isinstance(value, torch.Size):
            found[name] = tuple(value)
    return found


def _random_tensor(rng: random.Random, module: Any, seed: int) -> Any:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
    prepended = rng.randint(0, 2)
    axes = rng.sample(range(prepended + len(shape)), rng.randint(0, len(shape)))
    offsets = []
    for axis in axes:
        count = rng.randint(1, 5)
        offsets.append((axis, rng.randrange(count), count))
    return module.ShardedTensor.from_rank_offsets(
        f"key{seed}", torch.arange(float(np.prod(shape))).reshape(shape), *offsets,
        replica_id=rng.choice((0, 3, (0, 1, 0))), prepend_axis_num=prepended,
        allow_shape_mismatch=rng.random() < 0.5,
    )  # fmt: skip


def test_random_tensors_have_megatron_cores_attributes_places_and_narrowings(stock: Any) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        ours, theirs = (_random_tensor(rng, m, seed) for m in (mapping, stock.mapping))
        assert _attributes(ours) == _attributes(theirs) and repr(ours) == repr(theirs)
        assert ours.global_slice() == theirs.global_slice()
        assert ours.local_chunk_offset_in_global() == theirs.local_chunk_offset_in_global()
        assert ours.max_allowed_chunks() == theirs.max_allowed_chunks()
        assert ours.has_regular_grid and theirs.has_regular_grid
        assert utils._sharded_tensor_shard_id(ours) == stock.utils._sharded_tensor_shard_id(theirs)
        assert ours.without_data().data is None and ours.data is not None
        dim = rng.randrange(len(ours.local_shape))
        length = rng.randint(1, ours.local_shape[dim])
        start = rng.randint(0, ours.local_shape[dim] - length)
        mine, others = ours.narrow(dim, start, length), theirs.narrow(dim, start, length)
        assert [_attributes(p) for p in mine] == [_attributes(p) for p in others]
        shape = mine[0].local_shape
        assert mine[0].data.untyped_storage().data_ptr() == ours.data.untyped_storage().data_ptr()
        (empty,) = ours.without_data().narrow(dim, start, length)
        assert empty.data is None and empty.local_shape == shape
        empty.init_data("cpu", torch.zeros)
        assert empty.data.tolist() == torch.zeros(shape).tolist()


def test_objects_have_megatron_cores_unique_keys_and_keys_with_slashes_come_back(
    stock: Any,
) -> None:
    for place, grid in (((0,), (1,)), ((1, 2), (2, 4)), ((0, 0, 9), (1, 3, 10))):
        ours, theirs = (m.ShardedObject("a.b", 1, grid, place, 2) for m in (mapping, stock.mapping))
        assert ours.unique_key == theirs.unique_key and str(ours) == str(theirs)
        assert utils._sharded_object_id(ours) == stock.utils._sharded_object_id(theirs)
        both = [
            m.ShardedObject.empty_from_unique_key(ours.unique_key, 5)
            for m in (mapping, stock.mapping)
        ]
        assert _attributes(both[0]) == _attributes(both[1])
        deep = ShardedObject("rng/of shard_0_1/x", None, grid, place)
        assert ShardedObject.empty_from_unique_key(deep.unique_key) == deep
    single = ShardedObject("x", None, (), ())
    assert ShardedObject.empty_from_unique_key(single.unique_key) == single
    assert ShardedObject.empty_from_unique_key("k/shard_1.2_3").global_shape == (3, -1)
    for name in ("k", "k/shard_1", "k/shard_a_b", "k/shard_1_2_3", "k/shard_1.2.3_4"):
        with pytest.raises(CheckpointingException):
            ShardedObject.empty_from_unique_key(name)


def test_megatron_cores_entities_are_instances_of_ours_and_no_others_are(stock: Any) -> None:
    def make(m: Any) -> list[Any]:
        return [
            m.ShardedTensor.from_rank_offsets("w", torch.ones(2)),
            m.ShardedObject("o", 1, (1,), (0,)),
            m.ShardedTensorFactory("f", torch.ones(2), lambda *a: {}, lambda x: x),
            m.LocalNonpersistentObject(3),
        ]

    kinds = [
        mapping.ShardedTensor,
        mapping.ShardedObject,
        mapping.ShardedTensorFactory,
        mapping.LocalNonpersistentObject,
    ]
    for ours, theirs, kind in zip(make(mapping), make(stock.mapping), kinds, strict=True):
        for entity in (ours, theirs):
            assert [isinstance(entity, each) for each in kinds] == [each is kind for each in kinds]
            sharded = kind is not mapping.LocalNonpersistentObject
            assert isinstance(entity, mapping.ShardedBase) == sharded
            assert not isinstance(entity, type("Own", (kind,), {}))
        # Stock's functions take our entities for their own.
        assert isinstance(ours, type(theirs)) == sharded
        if sharded:
            changed = [dataclasses.replace(each, key="k") for each in (ours, theirs)]
            assert [type(each) for each in changed] == [type(ours), type(theirs)]
            assert [each.key for each in changed] == ["k", "k"]
    copied = pickle.loads(pickle.dumps(make(mapping)[0].without_data()))
    assert copied == make(mapping)[0].without_data()
    assert not isinstance(tilestone.ShardedObject("o", 1, (1,), (0,)), mapping.ShardedObject)
    assert not any(isinstance(each, mapping.ShardedTensor) for each in (None, {}, torch.ones(1)))


def _flat(
    begin: int, end: int, shape: tuple[int, ...], *offsets: Any, **rest: Any
) -> ShardedTensor:
    data = torch.arange(float(begin), float(end))
    return ShardedTensor.from_rank_offsets_flat(
        "w", data, shape, *offsets, flattened_range=slice(begin, end), **rest
    )


def test_flat_slices_know_their_elements_and_narrow_along_every_axis() -> None:
    rng = random.Random(7)
    for _ in range(300):
        least = 0 if rng.random() < 0.1 else 1
        shape = tuple(rng.randint(least, 4) for _ in range(rng.randint(1, 3)))
        count = int(np.prod(shape))
        begin = rng.randint(0, count)
        end = rng.randint(begin, count)
        part = _flat(begin, end, shape, (1, 1, 3), prepend_axis_num=1)
        whole = np.arange(float(count)).reshape(shape)
        local, everywhere = part.local_coordinates(), part.global_coordinates()
        assert part.data is not None and whole[local].tolist() == part.data.tolist()
        assert len(everywhere) == len(shape) + 1
        assert everywhere[0].tolist() == [0] * (end - begin)
        assert (everywhere[1] - local[0] == shape[0]).all()
        dim = rng.randrange(len(shape))
        length = rng.randint(0, shape[dim])
        start = rng.randint(0, shape[dim] - length)
        kept = np.take(whole, range(start, start + length), dim)
        pieces = part.narrow(dim, start, length)
        found = np.full(kept.size, -1.0)
        for piece in pieces:
            assert piece.local_shape == kept.shape and piece.data is not None and len(piece.data)
            assert piece.flattened_range is not None
            found[piece.flattened_range] = piece.data.numpy()
        mine = (kept.reshape(-1) >= begin) & (kept.reshape(-1) < end)
        assert found.tolist() == np.where(mine, kept.reshape(-1), -1).tolist()
    fresh = dataclasses.replace(_flat(2, 5, (2, 3)), data=None)
    fresh.init_data("meta")
    assert fresh.data is not None and tuple(fresh.data.shape) == (3,)
    for call in ("local_coordinates", "global_coordinates"):
        with pytest.raises(CheckpointingException):
            getattr(ShardedTensor.from_rank_offsets("w", torch.ones(2)), call)()


def test_the_documented_flat_narrowing() -> None:
    (piece,) = _flat(5, 10, (3, 4), (0, 1, 2)).narrow(0, 1, 1)
    assert (piece.flattened_range, piece.local_shape) == (slice(1, 4), (1, 4))
    assert (piece.global_shape, piece.global_offset) == ((2, 4), (1, 0))
    assert piece.data is not None and piece.data.tolist() == [5, 6, 7]
    assert _flat(5, 10, (3, 4)).narrow(0, 0, 1) == []
    assert [p.flattened_range for p in _flat(5, 10, (3, 4)).narrow(1, 1, 2)] == [
        slice(2, 4),
        slice(4, 5),
    ]


ONES = torch.ones(2, 3)
BAD = {
    "repeated axis": lambda: ShardedTensor.from_rank_offsets("w", ONES, (0, 0, 2), (0, 1, 3)),
    "axis": lambda: ShardedTensor.from_rank_offsets("w", ONES, (2, 0, 2)),
    "negative axis": lambda: ShardedTensor.from_rank_offsets("w", ONES, (-1, 0, 2)),
    "place": lambda: ShardedTensor.from_rank_offsets("w", ONES, (0, 2, 2)),
    "negative place": lambda: ShardedTensor.from_rank_offsets("w", ONES, (0, -1, 2)),
    "fragments": lambda: ShardedTensor.from_rank_offsets("w", ONES, (0, 0, 0)),
    "flat": lambda: ShardedTensor.from_rank_offsets(
        "w", ONES, flattened_range=slice(0, 2)  # type: ignore[arg-type]
    ),
    "not flat": lambda: ShardedTensor.from_rank_offsets_flat("w", ONES.flatten(), (2, 3)),
    "data not 1-D": lambda: ShardedTensor.from_rank_offsets_flat(
        "w", ONES, (2, 3), flattened_range=slice(0, 6)
    ),
    "range outside": lambda: _flat(3, 7, (2, 3)),
    "length": lambda: dataclasses.replace(_flat(1, 3, (2, 3)), flattened_range=slice(1, 4)),
    "step": lambda: dataclasses.replace(_flat(1, 3, (2, 3)), flattened_range=slice(1, 3, 1)),
    "open range": lambda: dataclasses.replace(_flat(1, 3, (2, 3)), flattened_range=slice(1, None)),
    "dtype": lambda: ShardedTensor("w", ONES, torch.int8, (2, 3), (2, 3), (0, 0), None),
    "shape": lambda: ShardedTensor("w", ONES, torch.float32, (2, 4), (2, 4), (0, 0), None),
    "offsets": lambda: ShardedTensor("w", ONES, torch.float32, (2, 3), (2, 3), (0,), None),
    "axes": lambda: ShardedTensor("w", ONES, torch.float32, (2, 3), (2, 3, 1), (0, 0, 0), None),
    "grid": lambda: ShardedTensor("w", ONES, torch.float32, (2, 3), (4, 3), (1, 0), (2, 1)),
    "object": lambda: ShardedObject("w", None, (2, 3), (0,)),
    "narrowed axis": lambda: ShardedTensor.from_rank_offsets("w", ONES).narrow(2, 0, 1),
    "narrowed range": lambda: ShardedTensor.from_rank_offsets("w", ONES).narrow(1, 2, 2),
    "narrowed irregular": lambda: ShardedTensor(
        "w", ONES, torch.float32, (2, 3), (5, 3), (3, 0), None
    ).narrow(0, 0, 1),
    "chunks of no grid": lambda: ShardedTensor(
        "w", ONES, torch.float32, (2, 3), (5, 3), (3, 0), None
    ).max_allowed_chunks(),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_fit_is_refused_with_its_key(bad: str) -> None:
    with pytest.raises(CheckpointingException) as raised:
        BAD[bad]()
    assert raised.value.key == "w"


def test_an_irregular_grid_may_begin_anywhere_and_an_empty_axis_has_a_place() -> None:
    part = ShardedTensor("w", ONES, torch.float32, (2, 3), (5, 3), (3, 0), None)
    assert not part.has_regular_grid and part.global_slice() == (slice(3, 5), slice(0, 3))
    empty = ShardedTensor.from_rank_offsets("w", torch.ones(0, 3), (0, 1, 2), (1, 1, 2))
    assert empty.local_chunk_offset_in_global() == (0, 1)
    (narrowed,) = empty.narrow(0, 0, 0)
    assert narrowed.global_shape == (0, 6)
    beside = dataclasses.replace(part, data=None, local_shape=(0, 3))
    assert utils._sharded_tensor_shard_id(part) != utils._sharded_tensor_shard_id(beside)


def _random_tree(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.random()
    if depth and kind < 0.35:
        names = [rng.choice("abcdefg") for _ in range(rng.randint(0, 4))]
        return {name: _random_tree(rng, depth - 1) for name in names}
    if depth and kind < 0.6:
        return [_random_tree(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return rng.choice((1, 2, 3.5, "x", None, (1, 2), (1, 3), np.int64(4), "a" * 40))


def _called(function: Any, *args: Any, **rest: Any) -> Any:
    """What a function returns and makes of its arguments, or the error it raises."""
    copied = pickle.loads(pickle.dumps(args))
    try:
        found = function(*copied, **rest)
        return list(found) if isinstance(found, Iterator) else found, copied
    except (ValueError, AssertionError, TypeError) as error:
        return type(error).__name__.replace("InvalidArgumentError", "ValueError")


def test_dict_utils_do_what_megatron_cores_do_with_random_trees(
    stock: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = stock.dict_utils

    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float)) or value == []

    for seed in range(400):
        rng = random.Random(seed)
        tree, other = _random_tree(rng), _random_tree(rng)
        if isinstance(tree, dict) and isinstance(other, dict) and seed % 2:
            other = {f"z{key}": value for key, value in other.items()}
        for as_dicts in (False, True):
            both = [
                _called(lambda x, m=m: m.extract_matching_values(x, is_number, as_dicts), tree)
                for m in (dict_utils, theirs)
            ]
            assert both[0] == both[1], (seed, tree)
        for name, args in (
            ("merge", (tree, other)),
            ("inspect_types", (tree,)),
        ):
            both = [_called(getattr(m, name), *args) for m in (dict_utils, theirs)]
            assert both[0] == both[1], (seed, name, tree)
        for name in ("dict_list_map_inplace", "dict_list_map_outplace"):
            both = [
                _called(lambda x, m=m: getattr(m, name)(str, x), tree) for m in (dict_utils, theirs)
            ]
            assert both[0] == both[1], (seed, name, tree)
        if isinstance(tree, (dict, list)):
            for name in ("nested_values", "nested_items_iter"):
                both = [_called(getattr(m, name), tree) for m in (dict_utils, theirs)]
                assert both[0] == both[1], (seed, name, tree)
            for function in ("dict_map", "dict_map_with_key"):
                both = [
                    _called(lambda x, m=m: getattr(m, function)(lambda *v: str(v), x), tree)
                    for m in (dict_utils, theirs)
                ]
                assert both[0] == both[1], (seed, function, tree)
        capsys.readouterr()
        mine, others = (
            (m.inspect_types({"t": torch.ones(2, 3), "x": tree}), capsys.readouterr().out)[1]
            for m in (dict_utils, theirs)
        )
        assert mine == others
    calls = (range(7), lambda x: x % 3, lambda x: -x, sum)
    assert dict_utils.map_reduce(*calls) == theirs.map_reduce(*calls)


def test_diff_finds_what_megatron_cores_finds(stock: Any) -> None:
    def sorted_paths(found: Any) -> Any:
        return [sorted(map(repr, part)) for part in found]

    compared = 0
    for seed in range(600):
        rng = random.Random(seed)
        left, right = _random_tree(rng), _random_tree(rng)
        if seed % 2:
            right = pickle.loads(pickle.dumps(left))
        try:
            expected = stock.dict_utils.diff(left, right)
        except (AssertionError, ValueError):  # Megatron-Core's: a list against something else
            assert any(dict_utils.diff(left, right)), (left, right)
            continue
        compared += 1
        assert sorted_paths(dict_utils.diff(left, right)) == sorted_paths(expected), (left, right)
    assert compared > 300
    tensors = ({"t": torch.tensor([1, 2, 3])}, {"t": torch.tensor([1, 5, 3])})
    assert dict_utils.diff(*tensors) == stock.dict_utils.diff(*tensors)
    assert dict_utils.diff({"n": np.arange(3)}, {"n": np.array([0, 1, 5])})[2] == [
        (("n", 2), np.int64, np.int64)
    ]


def test_diff_compares_what_megatron_core_fails_on() -> None:
    assert dict_utils.diff({"a": [1]}, {"a": None})[2] == [(("a",), list, type(None))]
    assert dict_utils.diff([np.float32(1)], [np.ones(2)])[2]
    one, broadcast = torch.ones(1), torch.ones(3)
    assert dict_utils.diff({"t": one}, {"t": broadcast})[2] == [
        (("t",), torch.Tensor, torch.Tensor, one.shape, broadcast.shape)
    ]
    objects = [{"o": ShardedObject("o", value, (1,), (0,))} for value in (1, 2)]
    assert dict_utils.diff(*objects)[2] == [(("o", ShardedObject), int, int)]


def test_factories_are_built_and_merged_as_megatron_core_does(stock: Any) -> None:
    def run(m: Any) -> Any:
        def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
            assert flattened_range is None
            return [m.ShardedTensor.from_rank_offsets(key, part) for part in data.chunk(2)]

        state = {"a": [1, m.ShardedTensorFactory("f", torch.arange(4.0), build, torch.cat)]}
        factories, _ = dict_utils.extract_matching_values(
            state, lambda v: isinstance(v, ShardedTensorFactory), return_lists_as_dicts=True
        )
        m.apply_factories(state)
        loaded = dict_utils.dict_list_map_outplace(lambda v: getattr(v, "data", v), state)
        return m.apply_factory_merges(loaded, factories)

    ours, theirs = run(mapping), run(stock.mapping)
    assert ours["a"][1].tolist() == theirs["a"][1].tolist() == [0, 1, 2, 3]
    for x1, x2 in (({}, {"a": 1}), ([1], [1, 2]), ([1], {"x": 1}), ([1], {3: 1}), (1, 2)):
        with pytest.raises(ValueError):
            mapping.apply_factory_merges(x1, x2)


def test_prefixes_of_keys_change_as_in_megatron_core(stock: Any) -> None:
    def state(m: Any) -> Any:
        return {
            "x": [_random_tensor(random.Random(0), m, seed) for seed in range(3)],
            "o": {"p": m.ShardedObject("key/rng", 1, (1,), (0,)), "n": 3},
        }

    def keys(found: Any) -> list[Any]:
        return [getattr(leaf, "key", leaf) for leaf in dict_utils.nested_values(found)]

    for name, args in (
        ("add_prefix_for_sharding", ("pre.",)),
        ("replace_prefix_for_sharding", ("key", "other")),
        ("apply_prefix_mapping", ({"key0": "a", "key": "b", "k": "c"},)),
    ):
        states = [state(mapping), state(stock.mapping), state(stock.mapping)]
        for module, each in zip((utils, stock.utils, utils), states, strict=True):
            getattr(module, name)(each, *args)
        assert keys(states[0]) == keys(states[1]) == keys(states[2]), name
    untouched = state(mapping)
    with pytest.raises(ValueError):
        utils.replace_prefix_for_sharding(untouched, "key0", "x")
    assert keys(untouched) == keys(state(mapping))


def test_parts_of_a_state_are_those_that_megatron_core_extracts(stock: Any) -> None:
    def state(m: Any) -> Any:
        return {
            "t": [_random_tensor(random.Random(0), m, 1), 5],
            "f": m.ShardedTensorFactory("f", torch.ones(1), lambda *a: {}, lambda x: x),
            "o": m.ShardedObject("o", 1, (1,), (0,)),
            "n": m.LocalNonpersistentObject(3),
            "c": {"empty": {}, "list": []},
        }

    for name in (
        "extract_sharded_tensors",
        "extract_sharded_tensors_and_factories",
        "extract_sharded_tensors_or_nonpersistent",
        "extract_sharded_base",
        "extract_nonpersistent",
    ):

        def told(found: Any) -> Any:
            return dict_utils.dict_list_map_outplace(lambda leaf: type(leaf).__name__, list(found))

        expected = told(getattr(stock.utils, name)(state(stock.mapping)))
        assert told(getattr(utils, name)(state(mapping))) == expected, name
        assert told(getattr(utils, name)(state(stock.mapping))) == expected, name


def test_times_are_logged_under_stacked_names_and_exceptions_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("own")
    with caplog.at_level(logging.DEBUG), utils.logger_stack("outer", logger):
        with utils.debug_time("inner"):
            utils.debug_msg("hello")
        with utils.debug_time("fast", threshold=1e9):
            pass
        with pytest.raises(KeyError), utils.debug_time("failing", threshold=1e9):
            raise KeyError
        with utils.debug_time("slow", threshold=0):
            pass
    texts = [(r.name, r.levelname, r.getMessage().split(" took ")[0]) for r in caplog.records]
    assert texts == [
        ("own", "DEBUG", "outer.inner hello"),
        ("own", "DEBUG", "outer.inner"),
        ("own", "WARNING", "outer.slow"),
    ]
    assert list(utils.zip_strict([1], [2])) == [(1, 2)]
    with pytest.raises(AssertionError, match=r"\[1, 2\]"):
        utils.zip_strict([1], [1, 2])


def test_eight_bit_tensors_become_what_they_quantised() -> None:
    def quantised(name: str, method: str) -> Any:
        made = type(name, (), {method: lambda self: torch.ones(2)})
        made.__module__ = "transformer_engine.pytorch.tensor"
        return type("Own", (made,), {})()

    for name, method in (("QuantizedTensor", "dequantize"), ("Float8Tensor", "from_float8")):
        item = ShardedObject("w", quantised(name, method), (1,), (0,))
        plain = ShardedObject("v", 3, (1,), (0,))
        utils.force_all_tensors_to_non_fp8({"a": [item, plain, 7]})
        assert item.data.tolist() == [1, 1] and plain.data == 3  # type: ignore[attr-defined]


def test_metadata_json_is_replaced_in_one_step_and_read_as_far_as_it_is_known(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / core.CONFIG_FNAME
    assert core.maybe_load_config("") is None and core.maybe_load_config(tmp_path / "no") is None
    config = core.CheckpointingConfig("zarr", 2)
    core.save_config(config, str(tmp_path))
    assert core.maybe_load_config(tmp_path) == config
    assert json.loads(path.read_text()) == {
        "sharded_backend": "zarr",
        "sharded_backend_version": 2,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    umask = os.umask(0o027)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    with monkeypatch.context() as patched, pytest.raises(tilestone.StorageError) as raised:
        patched.setattr(os, "replace", lambda *args: os.stat("/proc/none"))
        core.save_config(core.CheckpointingConfig("other"), tmp_path)
    assert raised.value.file == str(path)
    assert core.maybe_load_config(tmp_path) == config and os.listdir(tmp_path) == [path.name]
    path.write_text('{"sharded_backend": "torch_dist", "added_later": [1]}')
    assert core.maybe_load_config(tmp_path) == core.CheckpointingConfig("torch_dist")
    path.write_text('{"my": "own"}')
    assert not core.check_is_distributed_checkpoint(tmp_path)
    for text in ('{"sharded_ba', '{"sharded_backend": 3}'):
        path.write_text(text)
        with pytest.raises(tilestone.CorruptError) as corrupt:
            core.check_is_distributed_checkpoint(tmp_path)
        assert corrupt.value.file == str(path)


def _split(rng: random.Random, shape: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Random boxes that tile a tensor, sometimes changed so that they don't."""
    boxes: list[tuple[Any, Any]] = [((0,) * len(shape), shape)]
    for _ in range(rng.randint(0, 6)):
        index, axis = rng.randrange(len(boxes)), rng.randrange(len(shape))
        offset, size = (list(each) for each in boxes[index])
        if size[axis] > 1:
            cut = rng.randint(1, size[axis] - 1)
            behind = (offset[:axis] + [offset[axis] + cut] + offset[axis + 1 :], size[:])
            behind[1][axis] -= cut
            size[axis] = cut
            boxes[index] = (tuple(offset), tuple(size))
            boxes.append((tuple(behind[0]), tuple(behind[1])))
    index, change = rng.randrange(len(boxes)), rng.random()
    if change < 0.2:
        boxes.append(boxes[index])
    elif change < 0.4 and len(boxes) > 1:
        boxes.pop(index)
    elif change < 0.6:
        offset, size = boxes[index]
        boxes[index] = (offset, (max(1, size[0] - 1), *size[1:]))
    return boxes


def test_random_boxes_pass_exactly_where_each_element_has_one_main_replica() -> None:
    outcomes = set()
    for seed in range(1500):
        rng = random.Random(seed)
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        counts = np.zeros(shape, dtype=int)
        ranks: list[list[Any]] = [[], [], []]
        for offset, size in _split(rng, shape):
            part = ShardedTensor("w", None, torch.float32, size, shape, offset, None)
            ranks[rng.randrange(3)].append(part)
            counts[part.global_slice()] += 1
            ranks[rng.randrange(3)].append(dataclasses.replace(part, replica_id=(0, 1)))
        outcomes.add(bool((counts == 1).all()))
        if (counts == 1).all():
            validation.validate_sharding_integrity(ranks)
        else:
            with pytest.raises(tilestone.CoverageError, match="Invalid access pattern"):
                validation.validate_sharding_integrity(ranks)
    assert outcomes == {True, False}


def _grid(sizes: tuple[int, int], *places: int, **rest: Any) -> list[list[Any]]:
    return [
        [ShardedTensor.from_rank_offsets("w", torch.ones(sizes), (0, place, 4), **rest)]
        for place in places
    ]


def _objects(*places: int) -> list[list[Any]]:
    return [[ShardedObject("o", rank, (3,), (place,))] for rank, place in enumerate(places)]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (_grid((2, 3), 0, 1, 2, 3), None),
        (_grid((0, 3), 0, 1, 2, 3), None),
        (_grid((2, 3), 0, 1, 3), "box [4:6, 0:3] of a tensor of shape [8, 3] is held by no rank"),
        (_grid((2, 3), 0, 1, 2, 3, 1), "box [2:4, 0:3] is held by the main replicas of ranks 1 and 4"),
        (_grid((2, 3), 0, 1) + _grid((1, 6), 2, 3), "rank 0 has float32 [8, 3], rank 2 has float32 [4, 6]"),
        ([[_flat(0, 4, (2, 3))], [_flat(4, 4, (2, 3)), _flat(4, 6, (2, 3))]], None),
        ([[_flat(0, 4, (2, 3))], [_flat(3, 6, (2, 3))]], "box [1:2, 0:1] is held by the main replicas of ranks 0 and 1"),
        ([[_flat(0, 4, (2, 3))], [_flat(5, 6, (2, 3))]], "box [1:2, 1:2] of a tensor of shape [2, 3] is held by no rank"),
        (_objects(0, 1, 2), None),
        (_objects(0, 2), "the place [1] of an object whose grid is [3] is held by no rank"),
        (_objects(0, 1, 2, 1), "Duplicate ShardedObject keys: o/shard_1_3"),
        (_objects(0, 1, 3), "rank 2 holds the place [3]"),
        (
            [[ShardedTensor("w", None, torch.int8, (2,), (3,), (2,), None)]],
            "Invalid access pattern: what rank 0 holds: ",
        ),
        ([[ShardedObject("w", 0, (1,), (0,))], *_grid((2, 3), 0, 1, 2, 3)], "a tensor and of an object"),
    ],
)
def test_what_is_wrong_between_ranks_is_named(ranks: Any, text: str | None) -> None:
    if text is None:
        validation.validate_sharding_integrity(ranks)
        return
    with pytest.raises(CheckpointingException) as raised:
        validation.validate_sharding_integrity(ranks)
    assert text in str(raised.value) and raised.value.key in ("w", "o", "o/shard_1_3")


def test_boxes_of_many_ranks_are_checked_without_comparing_each_with_each() -> None:
    places = itertools.product(range(60), range(40))
    ranks = [
        [
            ShardedTensor("w", None, torch.int8, (2, 3), (120, 120), (2 * a, 3 * b), (60, 40)),
        ]
        for a, b in places
    ]
    validation.validate_sharding_integrity(ranks)


def test_strict_modes_are_megatron_cores(stock: Any) -> None:
    theirs = stock.validation.StrictHandling
    assert [(m.name, m.value) for m in StrictHandling] == [(m.name, m.value) for m in theirs]
    for mode, other in zip(StrictHandling, theirs, strict=True):
        for name in (
            "requires_explicit_ckpt_mismatch_check",
            "requires_global_app_metadata",
            "requires_returning_mismatch_keys",
        ):
            assert getattr(StrictHandling, name)(mode) == getattr(theirs, name)(other)
        assert validation.parse_strict_flag(mode.value) is mode
        assert validation.parse_strict_flag(mode) is mode
    with pytest.raises(ValueError, match="Invalid strict flag"):
        validation.parse_strict_flag("strictly")


@pytest.mark.parametrize("mode", StrictHandling)
def test_keys_that_differ_from_the_checkpoints_are_handled_as_in_megatron_core(
    stock: Any, mode: StrictHandling, caplog: pytest.LogCaptureFixture
) -> None:
    def call(m: Any, v: Any) -> Any:
        asked: Any = {key: m.ShardedObject(key, 1, (1,), (0,)) for key in "ab"}
        asked["b"] = [asked["b"]]
        stored = {key: m.ShardedObject(key, None, (1,), (0,)) for key in ("a", "c", "d")}
        others = [m.ShardedObject("d", None, (1,), (0,))]
        caplog.clear()
        try:
            by_all = [list(asked.values())[:1], others]
            left, missing, unexpected = v.validate_integrity_and_strict_load(
                asked, v.StrictHandling(mode.value), False, None, by_all, stored
            )
        except Exception as error:
            return sorted(word for word in ("Missing keys", "'c'", "'b'") if word in str(error))
        told = [word for word in ("Missing keys", "'c'", "'b'", "'d'") if word in caplog.text]
        return sorted(left), missing, unexpected, told

    assert call(mapping, validation) == call(stock.mapping, stock.validation)


def test_a_checkpoints_strategies_are_those_that_it_names(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strategy:
        can_handle_sharded_objects = False

        def __init__(self, *name: Any) -> None:
            self.name = name

        def check_backend_compatibility(self, loaded: str) -> None:
            assert loaded == self.name[1]

        def check_version_compatibility(self, loaded: int) -> None:
            assert loaded == self.name[2]

    base: Any = types.ModuleType("base")
    base.get_default_strategy = Strategy
    base.StrategyAction = types.SimpleNamespace(LOAD_SHARDED=1, LOAD_COMMON=2)
    monkeypatch.setitem(sys.modules, "tilestone.megatron.strategies.base", base)
    verify = validation.verify_checkpoint_and_load_strategy
    with pytest.raises(CheckpointingException, match="does not exist"):
        verify(tmp_path / "none")
    with pytest.raises(CheckpointingException, match="is not a distributed checkpoint"):
        verify(tmp_path)
    core.save_config(core.CheckpointingConfig("zarr", 3), tmp_path)
    sharded, common = verify(tmp_path, None, ("torch", 1))
    assert (sharded.name, common.name) == ((1, "zarr", 3), (2, "torch", 1))
    own = Strategy(0, "zarr", 3)
    assert verify(str(tmp_path), own)[0] is own
    with pytest.raises(CheckpointingException, match="ShardedObjects"):
        validation.validate_sharded_objects_handling(own, own)


def _rank_state(rank: int, world: int) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world)),
        "o": [ShardedObject("o", rank, (world,), (rank,)), mapping.LocalNonpersistentObject(rank)],
        "step": 5,
        "lr": torch.tensor([0.5, float("nan")]),
    }


def _preprocess(rank: int, world: int) -> None:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    validation.logger.addHandler(handler)
    sent = []
    broadcast = torch.distributed.broadcast_object_list

    def counted(objects: Any, **rest: Any) -> None:
        sent.append(objects)
        broadcast(objects, **rest)

    torch.distributed.broadcast_object_list = counted
    try:
        state = _rank_state(rank, world)
        sharded, common = state_dict_utils.save_preprocess(state)
        assert sorted(sharded) == ["o", "w"] and sorted(common) == ["lr", "step"]
        assert isinstance(state["o"][1], mapping.LocalNonpersistentObject)
        assert not sent and not logged  # equal, a NaN included: nothing travels but hashes
        state |= {"step": rank, "content_metadata": {"dp_cp_group": print, "v": 1}}
        state["f"] = ShardedTensorFactory("f", torch.ones(1), lambda *a: {"in": rank}, torch.cat)
        common = state_dict_utils.save_preprocess(state)[1]
        assert common["content_metadata"] == {"v": 1} and len(sent) == 1
        assert "dp_cp_group" in state["content_metadata"]
        expected = (
            f"Rank {rank} common state dict differs from rank 0 common state dict. "
            f"Keys only on rank 0: [], Keys only on {rank}: [], Mismatched keys: "
        )
        if rank == 0:
            assert logged == []
        else:
            assert len(logged) == 1 and logged[0].startswith(expected)
            assert "(('step',), <class 'int'>, <class 'int'>)" in logged[0]
        logged.clear()
        state_dict_utils.save_preprocess(state, True, lambda common: common.clear() or common)
        assert logged == [] and "step" in state
        unpicklable = _rank_state(rank, world) | {"step": lambda: rank}
        with pytest.raises(CheckpointingException, match="rank 0 can't pickle it"):
            state_dict_utils.save_preprocess(unpicklable)
    finally:
        torch.distributed.broadcast_object_list = broadcast
        validation.logger.removeHandler(handler)


def _invalid(rank: int, world: int) -> None:
    _preprocess(rank, world)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, min(rank, 1), world))}
    state_dict_utils.save_preprocess(state)


def test_ranks_compare_common_states_by_hash_and_all_raise_what_is_wrong_between_them(
    worlds: Worlds,
) -> None:
    results = worlds[3].collect(_invalid)
    for result in results:
        assert isinstance(result, Raised), result
        assert result.kind == "CoverageError", result.trace
        assert result.text == results[0].text
        assert "box [2:4] is held by the main replicas of ranks 1 and 2" in result.text


def test_a_template_is_taken_apart_without_empty_slices_and_stays_as_it_is() -> None:
    factory = ShardedTensorFactory("f", ONES, lambda *a: {"built": _flat(0, 1, (1,))}, torch.cat)
    state = {
        "x": [_flat(2, 2, (2, 3)), _flat(0, 6, (2, 3)), factory],
        "n": mapping.LocalNonpersistentObject([1]),
    }
    template, local, factories = state_dict_utils.load_preprocess(state)
    assert [type(leaf).__name__ for leaf in template["x"]] == ["ShardedTensor", "dict"]
    assert local == {"n": [1]} and list(factories["x"]) == [1]
    assert factories["x"][1].data is None and factories["x"][1].merge_fn is torch.cat
    assert len(state["x"]) == 3 and state["x"][2] is factory and factory.data is ONES


def _adam(m: Any, opt: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1, bias=False))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    adam.step()
    state = {
        name: m.ShardedTensor.from_rank_offsets(name, value, (0, 1, 2))
        for name, value in model.state_dict(keep_vars=True).items()
    }
    state["f"] = m.ShardedTensorFactory("f", model[0].weight, lambda *a: {}, lambda x: x)
    numbers = opt.get_param_id_to_sharded_param_map(state, model.parameters())
    found = adam.state_dict()
    opt.optim_state_to_sharding_state(found, numbers, ("step",))
    groups = [group["params"].unwrap() for group in found["param_groups"]]
    assert adam.state_dict()["param_groups"][0]["params"] == groups[0]
    kept = {
        (number, name): (item.key, tuple(item.data.shape), type(item).__name__)
        for number, items in found["state"].items()
        for name, item in items.items()
    }
    return {number: item.key for number, item in numbers.items()}, groups, kept


def test_optimizer_states_get_the_keys_and_places_that_megatron_core_gives_them(
    stock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _adam(stock.mapping, stock.optimizer)
    assert _adam(mapping, optimizer) == expected
    assert _adam(stock.mapping, optimizer) == expected
    assert expected[0] == {0: "f", 1: "0.bias", 2: "1.weight"}
    weight = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, 1, 2))
    half: Any = optimizer.make_sharded_optimizer_tensor(weight, ONES.to(torch.bfloat16), "state")
    assert (half.key, half.dtype, half.global_shape) == ("state.w", torch.bfloat16, (4, 3))
    with pytest.raises(CheckpointingException) as raised:
        optimizer.make_sharded_optimizer_tensor(weight, torch.ones(3), "state")
    assert raised.value.key == "state.w"
    states = {"state": {4: {"exp_avg": ONES}}, "param_groups": []}
    with pytest.raises(ValueError, match="Param id 4"):
        optimizer.optim_state_to_sharding_state(states, {})
    assert states["state"] == {4: {"exp_avg": ONES}}
    with caplog.at_level(logging.WARNING):
        assert optimizer.get_param_id_to_sharded_param_map({"w": weight}, []) == {}
    assert "keep_vars=True" in caplog.text
