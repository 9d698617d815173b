"""Compares the names of tilestone.megatron with those of the installed Megatron-Core.

Megatron-Core's names are read from its source, so nothing of it is imported. As a program, this
prints all names, and which of them are left out.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

OURS = "tilestone.megatron"
TABLE = pathlib.Path(__file__).parents[2] / "docs" / "megatron_names.md"


def _folder() -> pathlib.Path:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations
    for place in spec.submodule_search_locations:
        folder = pathlib.Path(place) / "core" / "dist_checkpointing"
        if folder.is_dir():
            return folder
    raise AssertionError("Megatron-Core is not installed")


def _modules() -> dict[str, ast.Module]:
    """Syntax trees by module name; "" is the package itself."""
    folder = _folder()
    trees = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """The names that statements define, also in branches of if and try, without imports."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((n.id, node) for n in ast.walk(target) if isinstance(n, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.If):
            yield from _definitions(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from _definitions(node.body + [s for h in node.handlers for s in h.body])


def _public(name: str, tree: ast.Module) -> dict[str, Any]:
    """A module's own public names; for the package, the names that it imports from its modules."""
    found = {n: node for n, node in _definitions(tree.body) if not n.startswith("_")}
    if not name:
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.level:
                found |= {alias.name: node for alias in node.names}
    return found


def _left_out() -> dict[tuple[str, str], str]:
    """The table's reasons by (module, name); the name "all" means a whole module."""
    rows = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            module, name = cells[0].strip("`"), cells[1].strip("`")
            assert (module, name) not in rows, f"{module} {name} is in the table twice"
            rows[module, name] = cells[2]
    return rows


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(f"{OURS}.{module}" if module else OURS) is not None
    except ModuleNotFoundError:
        return False


def _is_there(owner: Any, name: str) -> bool:
    """Whether a module or class has a name. Fields without a default are only annotations."""
    if hasattr(owner, name):
        return True
    bases = getattr(owner, "__mro__", ())
    return any(name in vars(base).get("__annotations__", {}) for base in bases)


def _parameters(function: ast.FunctionDef) -> list[tuple[str, str | None]]:
    """(name, source of the default or None) of each parameter. Variadic names have stars."""
    spec = function.args
    plain = spec.posonlyargs + spec.args
    defaults = [None] * (len(plain) - len(spec.defaults)) + list(spec.defaults)
    found: list[tuple[str, ast.expr | None]] = [
        (each.arg, default) for each, default in zip(plain, defaults, strict=True)
    ]
    if spec.vararg:
        found.append(("*" + spec.vararg.arg, None))
    found += [(each.arg, d) for each, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    if spec.kwarg:
        found.append(("**" + spec.kwarg.arg, None))
    return [(name, None if default is None else ast.unparse(default)) for name, default in found]


def _fields(cls: ast.ClassDef) -> list[tuple[str, str | None]]:
    """The same as _parameters() for the constructor of a dataclass or NamedTuple."""
    found = [node for node in cls.body if isinstance(node, ast.AnnAssign)]
    return [
        (ast.unparse(node.target), None if _is_field(node.value) else ast.unparse(node.value))
        for node in found
    ]


def _is_field(value: ast.expr | None) -> bool:
    """Whether a field has no default: no value, or a dataclasses.field() without one."""
    return value is None or (isinstance(value, ast.Call) and ast.unparse(value.func) == "field")


def _told(default: Any) -> str:
    """The source of one of our defaults, for comparison with Megatron-Core's."""
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    if inspect.isroutine(default) or inspect.isclass(default):
        return inspect.getsource(default) if default.__name__ == "<lambda>" else default.__name__
    if isinstance(default, float):
        return f"float('{default}')"
    return repr(default)


def _same_default(stock: str, ours: str) -> bool:
    if stock.startswith("lambda"):
        return stock in ours
    return ours in (stock, stock.rpartition(".")[2])


# Parameters that 0.16 requires, and that have a default from 0.19 on.
LATER_DEFAULTS = {
    ("strategies.torch.TorchDistSaveShardedStrategy.__init__", "backend"): "torch_dist",
    ("strategies.torch.TorchDistSaveShardedStrategy.__init__", "version"): 1,
}


def _check_parameters(where: str, stock: list[tuple[str, str | None]], ours: Any) -> list[str]:
    """The differences. Ours must have Megatron-Core's parameters in order, then only its own."""
    faults = []
    found = list(inspect.signature(ours).parameters.values())
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    named = [kinds.get(each.kind, "") + each.name for each in found]
    stock = [each for each in stock if each[0] not in ("self", "cls")]
    named = [each for each in named if each not in ("self", "cls")]
    found = [each for each in found if each.name not in ("self", "cls")]
    if named[: len(stock)] != [name for name, _ in stock]:
        return [f"{where}: parameters {named}, expected {[name for name, _ in stock]}"]
    for (name, default), each in zip(stock, found, strict=False):
        if default is None:
            none = inspect.Parameter.empty
            own = each.default not in (none, LATER_DEFAULTS.get((where, name), none))
        else:
            own = not _same_default(default, _told(each.default))
        if own:
            faults.append(f"{where}: default of {name} is {each.default!r}, expected {default}")
    for each in found[len(stock) :]:
        if each.default is inspect.Parameter.empty and each.kind not in kinds:
            faults.append(f"{where}: {each.name} is required, and unknown to Megatron-Core")
    return faults


def _check_class(where: str, stock: ast.ClassDef, ours: Any, left_out: set[str]) -> list[str]:
    """What our class lacks. Compares the constructor and the public methods."""
    faults = []
    if isinstance(ours, type) and not issubclass(ours, (enum.Enum, BaseException)):
        by_fields = any("dataclass" in ast.unparse(d) for d in stock.decorator_list) or any(
            ast.unparse(base) == "NamedTuple" for base in stock.bases
        )
        if by_fields:
            assert dataclasses.is_dataclass(ours) or issubclass(ours, tuple)
            faults += _check_parameters(where, _fields(stock), ours)
    for name, node in _definitions(stock.body):
        if name.startswith("_") and name != "__init__":
            continue
        label = f"{stock.name}.{name}"
        if (label in left_out) == _is_there(ours, name):
            fault = "listed and there" if label in left_out else "missing"
            faults.append(f"{where}.{name}: {fault}")
        elif isinstance(node, ast.FunctionDef) and label not in left_out:
            own = inspect.getattr_static(ours, name)
            is_property = "property" in {ast.unparse(d) for d in node.decorator_list}
            if is_property != isinstance(own, property):
                # Megatron-Core overrides this property with a method, which is truthy as well.
                if is_property or name != "can_handle_sharded_objects":
                    faults.append(f"{where}.{name}: is a property in only one of the two")
            elif not is_property:
                expected = _parameters(node)
                faults += _check_parameters(f"{where}.{name}", expected, getattr(ours, name))
    return faults


def _check_module(name: str, tree: ast.Module) -> list[str]:
    left_out = {n for module, n in _left_out() if module == name}
    if "all" in left_out:
        return [f"{name}: listed as left out, but exists"] if _exists(name) else []
    if not _exists(name):
        return [f"{name}: missing"]
    ours = importlib.import_module(f"{OURS}.{name}" if name else OURS)
    faults = []
    for public, node in _public(name, tree).items():
        where = f"{name}.{public}"
        if (public in left_out) == hasattr(ours, public):
            fault = "listed as left out, but exists" if public in left_out else "missing"
            faults.append(f"{where}: {fault}")
        elif public not in left_out and isinstance(node, ast.FunctionDef):
            faults += _check_parameters(where, _parameters(node), getattr(ours, public))
        elif public not in left_out and isinstance(node, ast.ClassDef):
            faults += _check_class(where, node, getattr(ours, public), left_out)
    return faults


STOCK = _modules()


@pytest.mark.parametrize("module", list(STOCK))
def test_every_name_parameter_and_default_is_there_or_in_the_table(module: str) -> None:
    assert _check_module(module, STOCK[module]) == []


def test_the_table_lists_names_of_megatron_core_each_with_a_reason() -> None:
    for (module, name), reason in _left_out().items():
        assert module in STOCK, module
        assert len(reason) > 15, (module, name)
        if name == "all":
            continue
        known = _public(module, STOCK[module])
        owner, _, member = name.partition(".")
        assert owner in known, (module, name)
        if member:
            assert member in dict(_definitions(known[owner].body)), (module, name)


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        ("def f(a, b=1, *, c='x'): pass", lambda a, b=2, *, c="x": None),
        ("def f(a, b=1): pass", lambda a: None),
        ("def f(a): pass", lambda a, b: None),
        ("def f(a): pass", lambda a=None: None),
        ("def f(a, b): pass", lambda b, a: None),
    ],
)
def test_the_comparison_detects_a_difference(stock: str, ours: Any) -> None:
    function = ast.parse(stock).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert _check_parameters("f", _parameters(function), ours)


# ---- Helpers for models, which are in other modules of Megatron-Core ----

MODELS = {
    "utils.py": [
        "make_tp_sharded_tensor_for_checkpoint",
        "make_sharded_tensor_for_checkpoint",
    ],
    "transformer/utils.py": [
        "make_sharded_tensors_for_checkpoint",
        "make_sharded_object_for_checkpoint",
        "sharded_state_dict_default",
        "ensure_metadata_has_dp_cp_group",
    ],
    "transformer/mlp.py": ["apply_swiglu_sharded_factory"],
    "transformer/multi_token_prediction.py": [
        "tie_word_embeddings_state_dict",
        "tie_output_layer_state_dict",
    ],
}


def definition_of(file: str, name: str) -> Any:
    """The syntax tree of a function or class in a file of Megatron-Core."""
    tree = ast.parse((_folder().parent / file).read_text(encoding="utf-8"))
    return next(node for node in ast.walk(tree) if getattr(node, "name", None) == name)


def fields_of(file: str, name: str) -> list[str]:
    """The names of a class's annotated attributes."""
    return [field for field, _ in _fields(definition_of(file, name))]


@pytest.mark.parametrize(
    ("file", "name"), [(file, name) for file, names in MODELS.items() for name in names]
)
def test_helpers_for_models_have_megatrons_parameters_and_defaults(file: str, name: str) -> None:
    from tilestone.megatron import models

    assert name in models.__all__
    stock = _parameters(definition_of(file, name))
    assert _check_parameters(name, stock, getattr(models, name)) == []


@pytest.mark.parametrize("name", ["get_pg_size", "get_pg_rank"])
def test_functions_of_groups_have_megatrons_parameters_and_defaults(name: str) -> None:
    from tilestone.megatron import groups

    stock = _parameters(definition_of("utils.py", name))
    assert _check_parameters(name, stock, getattr(groups, name)) == []


def _print_all() -> None:
    left_out = _left_out()
    for module, tree in STOCK.items():
        for name in sorted(_public(module, tree)):
            reason = left_out.get((module, name)) or left_out.get((module, "all"))
            state = reason or "there"
            print(f"{module or '(package)':45} {name:50} {state}")


if __name__ == "__main__":
    _print_all()


def test_a_save_strategy_is_made_with_the_parameters_and_defaults_of_0_19() -> None:
    strategies = importlib.import_module(f"{OURS}.strategies.torch")
    made = strategies.TorchDistSaveShardedStrategy(thread_count=1, cpu_shm_mode=True)
    assert (made.backend, made.version) == ("torch_dist", 1)
