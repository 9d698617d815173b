"""Hostile pickles, zip files and archives of torch.save, by hand: inputs for make_inputs.py."""

from __future__ import annotations

import io
import pickle
import struct
import zlib

Files = dict[str, bytes]

# ---- Hostile pickles ----

RUN = b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R."
EVAL = b"\x80\x02cbuiltins\neval\nX\x05\x00\x00\x001 + 1\x85R."


def pickles() -> Files:
    deep = 20_000
    doubling = b"\x80\x02)" + b"2\x86" * 60 + b"."
    return {
        "runs_a_program": RUN,
        "evaluates_text": EVAL,
        "object_that_runs_a_program": b"\x80\x02cposix\nsystem\n)\x81}b.",
        "stack_global_by_parts": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
        "getattr_chain": b"\x80\x02cbuiltins\ngetattr\ncposix\nsystem\nX\x01\x00\x00\x00a\x86R.",
        # CVE-2026-24747: an item is set on an object that is not a dict.
        "item_set_on_a_list": b"\x80\x02]K\x01K\x02s.",
        "item_set_on_an_int": b"\x80\x02K\x05K\x01K\x02s.",
        "items_set_on_a_tuple": b"\x80\x02)(K\x01K\x02u.",
        "append_to_a_dict": b"\x80\x02}K\x01a.",
        "state_of_an_int": b"\x80\x02K\x01}b.",
        "deep_lists": b"\x80\x02" + b"]" * deep + b"a" * (deep - 1) + b".",
        "deep_tuples": b"\x80\x02)" + b"\x85" * deep + b".",
        "doubling_tuples": doubling,
        "flood_of_memos": b"\x80\x02N" + b"".join(
            b"r" + struct.pack("<I", i * 4096) for i in range(5000)
        ) + b".",
        "memo_far_out": b"\x80\x02Nr\xff\xff\xff\xffj\xff\xff\xff\xff.",
        "memo_unset": b"\x80\x02h\x07.",
        "stack_empty": b"\x80\x02R.",
        "marks_without_end": b"\x80\x02" + b"(" * 50_000,
        "stop_of_nothing": b"\x80\x02.",
        "long_of_minus_bytes": b"\x80\x02\x8b\xff\xff\xff\xff.",
        "text_of_2_63": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "bytes_of_2_64": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xff.",
        "frame_that_lies": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffN.",
        "protocol_255": b"\x80\xffN.",
        "contains_itself": b"\x80\x02]q\x00h\x00a.",
        # Protocols 0 and 1.
        "text_runs_a_program": b"cos\nsystem\n(S'true'\ntR.",
        "instance_runs_a_program": b"(S'true'\nios\nsystem\n.",
        "class_on_the_stack": b"(cos\nsystem\nU\x04trueo.",
        "class_of_nothing": b"(o.",
        "extension_code": b"\x80\x02\x82\x01)R.",
        "extension_of_four_bytes": b"\x80\x02\x84\xff\xff\xff\xff.",
        "quotes_that_lie": b"S'a\\'\n.",
        "escapes_that_lie": b"(S'\\x4'\nV\\u12\nV\\U00110000\nt.",
        "int_of_many_digits": b"I" + b"9" * 5000 + b"\n.",
        "long_of_many_digits": b"(" + b"L-" * 3 + b"9" * 4300 + b"L\nt.",
        "index_of_2_64": b"Np18446744073709551616\n.",
        "text_that_doubles": b"(" + b"V" + b"\xff" * 5000 + b"\nt.",
        "flood_of_text": b"(" + b"S''\n" * 5000 + b"t.",
        "buffer_elsewhere": b"\x80\x05\x97\x98.",
        # Other encodings of the same thing.
        "attributes_without_end": b"\x80\x02c__builtin__\ngetattr\nq\x00cm\nC\n"
        + b"q\x01h\x00h\x01X\x01\x00\x00\x00a\x86R" * 20 + b".",
        "attribute_of_a_dotted_name": b"\x80\x02cbuiltins\ngetattr\ncm\nC\nX\x03\0\0\0a.b\x86R.",
        "keyword_that_is_an_int": b"\x80\x02cm\nC\n)}K\x01K\x02s\x92.",
        "partial_of_itself": b"\x80\x02cfunctools\npartial\nq\x00h\x00\x85Rq\x01(h\x01h\x01NNtb)R.",
        "newobj_of_nothing": b"\x80\x02ccopy_reg\n__newobj__\n)R.",
        "rest_of_a_tuple": b"\x80\x02(cm\nC\n" + b"K\x01" * 3000 + b"tq\x00("
        + b"ccopy_reg\n__newobj__\nh\x00R" * 300 + b"t.",
        "shared_beyond_memory": b"\x80\x02](X\x00\x10\x00\x00" + b"a" * 4096 + b"q\x00"
        + b"h\x00" * 20_000 + b"e.",
    }


# ---- Hostile zip archives ----


def local(name: bytes, data: bytes, method: int = 0, crc: int | None = None) -> bytes:
    crc = zlib.crc32(data) if crc is None else crc
    sizes = struct.pack("<III", crc, len(data), len(data))
    return b"PK\x03\x04" + struct.pack("<HHHHH", 20, 0, method, 0, 0) + sizes + struct.pack(
        "<HH", len(name), 0
    ) + name + data


def central(name: bytes, data: bytes, at: int, method: int = 0, size: int | None = None) -> bytes:
    size = len(data) if size is None else size
    return b"PK\x01\x02" + struct.pack(
        "<HHHHHHIIIHHHHHII",
        20, 20, 0, method, 0, 0, zlib.crc32(data), size, size, len(name), 0, 0, 0, 0, 0, at,
    ) + name  # fmt: skip


def end(count: int, size: int, at: int, comment: bytes = b"") -> bytes:
    return b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, count, count, size, at, len(comment))


def archive(records: list[tuple[bytes, bytes]], more: bytes = b"") -> bytes:
    """A stored zip archive of these records, followed by more bytes."""
    body, directory = b"", b""
    for name, data in records:
        directory += central(name, data, len(body))
        body += local(name, data)
    return body + directory + end(len(records), len(directory), len(body)) + more


def zips() -> Files:
    one = [(b"archive/data.pkl", b"N."), (b"archive/data/0", bytes(64))]
    body = local(b"a/x", b"1234") + local(b"a/y", b"5678")
    overlapping = central(b"a/x", b"1234", 0, size=40) + central(b"a/y", b"5678", 37)
    twice = central(b"a/x", b"1234", 0) + central(b"a/y", b"1234", 0)
    lying = central(b"a/z", b"1234", 0)
    deflated = zlib.compress(bytes(1000))[2:-4]
    packed_body = local(b"a/x", deflated, 8)
    return {
        "overlapping_records": body + overlapping + end(2, len(overlapping), len(body)),
        "one_record_under_two_names": body + twice + end(2, len(twice), len(body)),
        "two_records_of_one_name": archive([one[0], one[0]]),
        "other_name_in_the_local_header": body + lying + end(1, len(lying), len(body)),
        "deflated": packed_body
        + central(b"a/x", deflated, 0, 8)
        + end(1, 49, len(packed_body)),
        "wrong_crc": local(b"a/x", b"1234", crc=1) + central(b"a/x", b"1234", 0) + end(1, 49, 37),
        "bytes_behind_the_end": archive(one, b"more"),
        "two_ends": archive(one) + archive(one),
        "count_of_65535": archive(one)[:-12] + b"\xff\xff\xff\xff" + archive(one)[-8:],
        "directory_behind_the_end": archive(one)[:-6] + b"\xff\xff\xff\x7f\x00\x00",
        "directory_of_minus_bytes": archive(one)[:-10] + b"\xff\xff\xff\xff" + archive(one)[-6:],
        "names_that_climb": archive([(b"../../etc/passwd", b"x"), (b"/abs", b"y")]),
        "nul_in_a_name": archive([(b"archive/data.pkl\x00.txt", b"N.")]),
        "nothing_but_an_end": end(0, 0, 0),
    }


# ---- Hostile tensors ----


class Global(str):
    """module\\nname, pickled as a global."""


class Storage(tuple):
    """Pickled as a persistent id, as torch pickles a storage."""


class TensorPickler(pickle._Pickler):  # type: ignore[name-defined]
    """Pickles globals and storages by name, so that no real objects are needed."""

    dispatch = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_by_name(self, obj: Global) -> None:
        self.write(b"c" + obj.encode() + b"\n")

    dispatch[Global] = save_by_name

    def persistent_id(self, obj: object) -> object:
        return tuple(obj) if isinstance(obj, Storage) else None


def rebuilt(elements: int, offset: int, size: tuple, stride: tuple, dtype: str = "Float") -> bytes:
    """A tensor in the form in which torch.save pickles it."""
    storage = Storage(("storage", Global(f"torch\n{dtype}Storage"), "0", "cpu", elements))
    hooks = Call(Global("collections\nOrderedDict"), ())
    out = io.BytesIO()
    pickler = TensorPickler(out, 2)
    pickler.dispatch[Call] = save_call
    pickler.dump(
        Call(
            Global("torch._utils\n_rebuild_tensor_v2"),
            (storage, offset, size, stride, False, hooks),
        )
    )
    return out.getvalue()


class Call:
    """Calls function(*args) when it is unpickled."""

    def __init__(self, function: Global, args: tuple) -> None:
        self.function, self.args = function, args


def save_call(pickler: TensorPickler, obj: Call) -> None:
    pickler.save(obj.function)
    pickler.save(obj.args)
    pickler.write(b"R")


def item(content: bytes, record: bytes = bytes(16)) -> bytes:
    names = (b"archive/data.pkl", b"archive/data/0", b"archive/version")
    return archive(list(zip(names, (content, record, b"3\n"), strict=True)))


def tensors() -> Files:
    return {
        "runs_a_program": item(RUN),
        "bare_pickle_that_runs_a_program": b"cos\nsystem\n(S'true'\ntR.",
        "storage_without_a_tensor": item(b"\x80\x02(K\x01K\x02tQ."),
        # CVE-2026-24747: the storage states another size than that of its record.
        "storage_larger_than_its_record": item(rebuilt(1 << 20, 0, (1 << 20,), (1,))),
        "storage_smaller_than_its_record": item(rebuilt(1, 0, (1,), (1,)), bytes(4096)),
        "storage_of_minus_elements": item(rebuilt(-4, 0, (4,), (1,))),
        "storage_of_2_62_elements": item(rebuilt(1 << 62, 0, (1 << 62,), (1,))),
        "offset_beyond_the_storage": item(rebuilt(4, 5, (1,), (1,))),
        "offset_of_minus_one": item(rebuilt(4, -1, (4,), (1,))),
        "strides_leave_the_storage": item(rebuilt(4, 0, (2, 2), (1 << 40, 1))),
        "stride_of_minus_one": item(rebuilt(4, 3, (4,), (-1,))),
        "stride_of_nothing": item(rebuilt(4, 0, (1 << 50,), (0,))),
        "shape_product_wraps": item(rebuilt(4, 0, (1 << 32, 1 << 32), (0, 0))),
        "shape_of_minus_two": item(rebuilt(4, 0, (-2, -2), (1, 1))),
        "more_strides_than_dims": item(rebuilt(4, 0, (4,), (1, 1, 1))),
        "a_thousand_dims": item(rebuilt(4, 0, (1,) * 1000, (1,) * 1000)),
    }


# ---- Hostile metadata ----
