"""Tests of tools/check_includes: it accepts good trees, and reports bad ones at the right line."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).parent / "check_includes"


def check(files: dict[str, str]) -> tuple[int, list[str]]:
    """Runs the tool over a tree of these files. Returns the exit code and the output lines."""
    with tempfile.TemporaryDirectory() as root:
        for name, text in files.items():
            path = pathlib.Path(root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            for included in re.findall(r'^#include "(tilestone/.*)"$', text, re.M):
                header = pathlib.Path(root, included)
                header.parent.mkdir(parents=True, exist_ok=True)
                if not header.exists() and "missing" not in included:
                    header.touch()
        result = subprocess.run(
            [sys.executable, TOOL, "--root", root], capture_output=True, text=True, check=False
        )
    assert not result.stderr, result.stderr
    return result.returncode, result.stdout.splitlines()


class CheckIncludesTest(unittest.TestCase):
    def assert_violation(self, files: dict[str, str], *expected: str) -> None:
        code, lines = check(files)
        self.assertEqual((code, lines), (1, list(expected)))

    def test_a_tree_that_follows_the_table_passes(self):
        files = {
            "tilestone/base/error.h": "#include <string>\n",
            "tilestone/base/error.cc": '#include "tilestone/base/error.h"\n#include <fmt/core.h>\n',
            "tilestone/version.h": "#pragma once\n",
            "tilestone/geometry/box.h": '#include "tilestone/base/error.h"\n'
            '#include "tilestone/version.h"\n',
            "tilestone/format/format.h": '#include "tilestone/geometry/box.h"\n',
            "tilestone/format/zarr/zarr.h": '#include "tilestone/format/format.h"\n',
            "tilestone/engine/save.h": '#include "tilestone/format/zarr/zarr.h"\n',
            "tilestone/tilestone.h": '#include "tilestone/engine/save.h"\n',
            "tilestone/cli/main.cc": '#include "tilestone/cli/ls.h"\n',
            "tilestone/cli/ls.h": '#include "tilestone/tilestone.h"\n',
            "python/src/module.cc": '#include "bindings.h"\n#include "tilestone/tilestone.h"\n',
            "python/src/cli.cc": '#include "tilestone/cli/ls.h"\n',
            "python/src/bindings.h": "#include <nanobind/nanobind.h>\n",
            "examples/cmake_user/main.cc": "#include <tilestone/tilestone.h>\n",
        }
        self.assertEqual(check(files), (0, []))

    def test_a_folder_may_not_include_one_below_it(self):
        self.assert_violation(
            {"tilestone/base/error.h": '\n#include "tilestone/geometry/box.h"\n'},
            "tilestone/base/error.h:2: base may not include geometry (tilestone/geometry/box.h)",
        )

    def test_storage_and_comm_know_nothing_of_tensors(self):
        for folder in ("storage", "comm"):
            self.assert_violation(
                {f"tilestone/{folder}/x_test.cc": '#include "tilestone/state/value.h"\n'},
                f"tilestone/{folder}/x_test.cc:1: {folder} may not include state "
                "(tilestone/state/value.h)",
            )

    def test_formats_do_not_include_one_another(self):
        self.assert_violation(
            {"tilestone/format/zarr/a.cc": '#include "tilestone/format/torch_dist/zip.h"\n'},
            "tilestone/format/zarr/a.cc:1: format/zarr may not include format/torch_dist "
            "(tilestone/format/torch_dist/zip.h)",
        )

    def test_format_does_not_include_its_subfolders(self):
        self.assert_violation(
            {"tilestone/format/a.cc": '#include "tilestone/format/zarr/zarr.h"\n'},
            "tilestone/format/a.cc:1: format may not include format/zarr "
            "(tilestone/format/zarr/zarr.h)",
        )

    def test_users_of_the_library_see_only_the_umbrella_header(self):
        for folder, layer in (("tilestone/cli", "cli"), ("examples", "examples")):
            self.assert_violation(
                {f"{folder}/a.cc": '#include "tilestone/state/value.h"\n'},
                f"{folder}/a.cc:1: {layer} may not include state (tilestone/state/value.h)",
            )

    def test_the_library_itself_may_not_include_the_umbrella_header(self):
        self.assert_violation(
            {"tilestone/engine/a.cc": '#include "tilestone/tilestone.h"\n'},
            "tilestone/engine/a.cc:1: engine may not include tilestone.h (tilestone/tilestone.h)",
        )

    def test_include_cycles_are_refused(self):
        self.assert_violation(
            {
                "tilestone/base/a.h": '#include "tilestone/base/b.h"\n',
                "tilestone/base/b.h": '#include "tilestone/base/a.h"\n',
            },
            "tilestone/base/b.h:1: includes itself: "
            "tilestone/base/a.h -> tilestone/base/b.h -> tilestone/base/a.h",
        )

    def test_import_cycles_are_refused_in_functions_for_types_and_through_packages(self):
        folder = "python/tilestone/megatron"
        self.assert_violation(
            {
                "python/tilestone/__init__.py": "",
                "python/tilestone/_torch/__init__.py": "",
                "python/tilestone/_torch/opaque.py": "from tilestone._torch import plain\n",
                "python/tilestone/_torch/plain.py": "from typing import TYPE_CHECKING\n"
                "if TYPE_CHECKING:\n    from tilestone._torch.opaque import Opaque\n",
                f"{folder}/__init__.py": "from tilestone.megatron.names import load\n",
                f"{folder}/names.py": "def load():\n    from tilestone.megatron import names_of\n",
                f"{folder}/calls.py": "from tilestone.megatron.strategies._shares import share\n",
                f"{folder}/strategies/__init__.py": "from tilestone.megatron.strategies import own\n",
                f"{folder}/strategies/_shares.py": "",
                f"{folder}/strategies/own.py": "import sys\n\n\ndef save():\n"
                "    from tilestone.megatron import calls\n",
            },
            "python/tilestone/_torch/plain.py:3: imports itself: python/tilestone/_torch/opaque.py -> "
            "python/tilestone/_torch/plain.py -> python/tilestone/_torch/opaque.py",
            f"{folder}/names.py:2: imports itself: {folder}/__init__.py -> {folder}/names.py -> "
            f"{folder}/__init__.py",
            f"{folder}/strategies/own.py:5: imports itself: {folder}/calls.py -> "
            f"{folder}/strategies/__init__.py -> {folder}/strategies/own.py -> {folder}/calls.py",
        )

    def test_relative_and_angled_includes_of_our_headers_are_refused(self):
        self.assert_violation(
            {"tilestone/base/a.cc": '#include "a.h"\n#include <tilestone/base/a.h>\n'},
            "tilestone/base/a.cc:1: \"a.h\" is not a path from the root to a layer's header",
            'tilestone/base/a.cc:2: <tilestone/base/a.h>: include our own headers with ""',
        )

    def test_public_headers_need_no_library_of_ours(self):
        text = "#include <nlohmann/json.hpp>\n"
        self.assert_violation(
            {"tilestone/format/a.h": text, "tilestone/format/b_internal.h": text},
            "tilestone/format/a.h:1: a public header may not include <nlohmann/json.hpp>",
        )

    def test_an_included_header_exists(self):
        self.assert_violation(
            {"tilestone/cli/a.cc": '#include "tilestone/cli/missing.h"\n'},
            "tilestone/cli/a.cc:1: tilestone/cli/missing.h does not exist",
        )

    def test_an_unknown_folder_is_named(self):
        self.assert_violation(
            {"tilestone/util/a.h": ""},
            "tilestone/util/a.h:1: is in a folder that the table of layers does not name",
        )

    def test_python_modules_import_only_from_rows_above_theirs(self):
        files = {
            "python/tilestone/__init__.py": "from tilestone._training_run.manager import load\n",
            "python/tilestone/_training_run/manager.py": "import sys\n"
            "from tilestone import _calls, _core\n\n"
            "def load():\n    from tilestone._torch.comm import Comm\n",
            "python/tilestone/_calls/bridge.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from tilestone._training_run.steps import BegunSave\n"
            "else:\n    import tilestone._objects.entities\n"
            "    from tilestone._calls import steps\n",
        }
        self.assertEqual(check(files), (0, []))

    def test_python_imports_from_the_same_row_or_below_are_reported_in_functions_too(self):
        self.assert_violation(
            {
                "python/tilestone/_objects/entities.py": "def view():\n"
                "    from tilestone import _calls, _core\n",
                "python/tilestone/_calls/bridge.py": "import tilestone._training_run.a\nimport tilestone\n",
                "python/tilestone/megatron/models.py": "from tilestone import Box\n"
                "try:\n    from tilestone.dcp.planner import Planner\nexcept ImportError: pass\n",
            },
            "python/tilestone/_calls/bridge.py:1: _calls may not import _training_run",
            "python/tilestone/_calls/bridge.py:2: _calls may not import __init__",
            "python/tilestone/_objects/entities.py:2: _objects may not import _calls",
            "python/tilestone/megatron/models.py:1: megatron may not import __init__",
            "python/tilestone/megatron/models.py:3: megatron may not import dcp",
        )

    def test_a_python_module_in_no_row_and_a_relative_import_are_reported(self):
        self.assert_violation(
            {
                "python/tilestone/_new.py": "",
                "python/tilestone/_training_run/a.py": "from tilestone._new import x\nfrom . import _core\n",
            },
            "python/tilestone/_new.py:1: _new is in no row of the table of Python modules",
            "python/tilestone/_training_run/a.py:1: _new is in no row of the table",
            'python/tilestone/_training_run/a.py:2: ".": use an absolute import',
        )


if __name__ == "__main__":
    unittest.main()
