"""The value objects of options (`Checks`, `Reading`, ...), and the options of each call.

They are made from the fields of the engine's structs (table.py, which is made from C++), with
types, defaults and explanations; only what Python alone has is declared here. `tools/options --fix`
writes their stub and docs/options.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tilestone import _core
from tilestone._options import valid
from tilestone._options.kinds import (
    Options, Value, best, checked_framework, count, made, number_of_bytes, one_of, option, optional,
    ranks_or_group, report,
)
from tilestone._options.rename import renaming
from tilestone._options.table import FIELDS, WORDS

#: By C++ type: the type in Python, the check, and the default where it is not the engine's.
_TYPES: dict[str, tuple[Any, ...]] = {
    "bool": ("bool", valid.flag),
    "int": ("int", valid.whole),
    "uint64_t": ("int", number_of_bytes),
    "double": ("float | None", valid.seconds),
    "size_t": ("int", count),
    "std::string": ("str", valid.word),
    "std::shared_ptr<const Format>": ("str | None", optional(valid.word), None),
    "std::map<std::string, std::string>": ("Mapping[str, str] | None", valid.texts, None),
    "std::map<std::string, Attributes>": (
        "Mapping[str, Mapping[str, Any]] | None", valid.by_key, None,
    ),
    "std::vector<int>": ("ProcessGroup | Collection[int] | None", ranks_or_group, None),
    "std::function<std::string(const std::string&)>": ("Rename | None", renaming, None),
    "ProgressFn": ("bool | ProgressCallback", valid.sink, False),
    "Best": ("tuple[str, str, int]", best),
    "Location": ("str | os.PathLike[str]", lambda name, value: valid.directory(value, name)),
    "LoadReport*": ("LoadReport | None", optional(report), None),
    **{name: ("str", one_of(*words)) for name, words in WORDS.items()},
}  # fmt: skip

#: Fields whose default in Python is not the engine's.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    **{f"ByFiles.{name}": ("int | None", optional(valid.whole), None) for name in ("rank", "world_size")},
    "Keep.every": ("int | None", optional(count), None),
    "ByFiles.token": ("str | None", optional(valid.word), None),
    "SaveOptions.format": ("str", valid.word, "torch_dist"),
    "SaveOptions.dialect": ("str", valid.word, "pytorch"),
}

#: Fields that are no keywords: what takes part, what a call fills in itself, and what only the
#: drop-ins set (`Prepared.engine`).
_NO_KEYWORDS = frozenset({
    "comm", "step", "interrupt", "unmarked", "subtrees", "unmade", "kept_empty", "complete",
    "by_files", "tp_replica_names", "separation_hint", "verify_integrity", "fill_empty",
    "sharded_only", "objects_by_grid", "log_report",
})  # fmt: skip


def _made_of(struct: str, base: type[Options], name: str = "", **own: tuple[str, Any]) -> Any:
    """A class of options with the fields of an engine's struct, and more: (type, field)."""
    about, fields = FIELDS[struct]
    engine, rows = getattr(_core, struct)(), dict(own)
    for field, (declared, text) in fields.items():
        may_be_none = declared.startswith("std::optional<")
        inner = declared.removeprefix("std::optional<").removesuffix(">") if may_be_none else declared
        if field in _NO_KEYWORDS:
            continue
        kind, check, *default = _DEFAULTS.get(f"{struct}.{field}") or _TYPES[inner]
        if may_be_none:
            kind = kind.removesuffix(" | None") + " | None"
            check, default = optional(check), [None]
        value = default[0] if default else getattr(engine, field)
        rows[field] = kind, option(value, check, text)
    members = [(field, kind, row) for field, (kind, row) in rows.items()]
    of = {"__doc__": about, "__module__": __name__}
    cls = dataclasses.make_dataclass(
        name or struct, members, bases=(base,), namespace=of, frozen=True, repr=base is Options
    )
    cls.__module__ = __name__
    if base is Value:
        _TYPES[struct] = (struct, made(cls), cls())
    return cls


ByFiles = _made_of("ByFiles", Value)
LocalCopies = _made_of("LocalCopies", Value)
Checks = _made_of("Checks", Value)
Differences = _made_of("Differences", Value)
Reading = _made_of("Reading", Value)
Resources = _made_of("Resources", Value)
Keep = _made_of("Keep", Value)

#: The value objects, in the order of docs/options.md.
VALUES: tuple[type[Value], ...] = (
    ByFiles, LocalCopies, Checks, Differences, Reading, Resources, Keep,
)  # fmt: skip

SaveOptions = _made_of("SaveOptions", Options)
AsyncSaveOptions = _made_of(
    "AsyncOptions", SaveOptions, "AsyncSaveOptions",
    stage=("str", option(
        "copy", one_of("copy", "lazy"),
        """when arrays are copied. "copy": before the call returns. "lazy": torch's tensors and
        DTensors of more than 64 KiB, in host memory and on GPUs, are copied after it, while forward
        and backward run. The next step of a torch optimizer, or `AsyncSave.staged.result()`, ends
        that: it copies the rest. A snapshot is one step, or the save fails and names the key;
        docs/saving.md says what torch does not notice. Other arrays are copied before the call
        returns.""",
    )),
)  # fmt: skip
LoadOptions = _made_of(
    "LoadOptions", Options,
    allow_classes=("Collection[str]", option(
        (), valid.names,
        """names ("argparse.Namespace") of classes whose objects may be created. Objects of plain
        types (sets, paths, dates, numpy's scalars and the like) need no permission. An object of
        any other class comes back as `Opaque`, which `save` writes as the original object. Pickles
        are never run.""",
    )),
)  # fmt: skip
OpenOptions = _made_of(
    "OpenOptions", Options,
    framework=("str", option(
        "numpy", checked_framework,
        '"numpy" or "torch": the kind of arrays that `read` returns.',
    )),
)  # fmt: skip

#: The options of each call, by the name of its TypedDict.
CALLS: dict[str, type[Options]] = {
    "SaveKeywords": SaveOptions, "AsyncSaveKeywords": AsyncSaveOptions,
    "LoadKeywords": LoadOptions, "OpenKeywords": OpenOptions,
}  # fmt: skip
