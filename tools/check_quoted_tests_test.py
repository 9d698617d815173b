"""Tests of tools/check_quoted_tests: it finds quoted tests, and reports those that do not exist."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).parent / "check_quoted_tests"
TREE = {
    "tilestone/geometry/box_test.cc": "TEST(Box, IsEmpty) {}\nTEST_P(Random,\n       Boxes) {}\n",
    "python/tests/test_box.py": "def test_a_box() -> None:\n    def test_inner(): ...\n",
}


def check(document: str, name: str = "docs/incidents.md") -> tuple[int, list[str]]:
    """Runs the tool over a tree with this document. Returns the exit code and the output lines."""
    with tempfile.TemporaryDirectory() as root:
        for each, text in {**TREE, name: document}.items():
            path = pathlib.Path(root, each)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        result = subprocess.run(
            [sys.executable, TOOL, "--root", root], capture_output=True, text=True, check=False
        )
    assert not result.stderr, result.stderr
    return result.returncode, result.stdout.splitlines()


class CheckQuotedTestsTest(unittest.TestCase):
    def test_tests_that_exist_and_other_words_pass(self):
        names = "`Box.IsEmpty`, `Box.*`, `Box.Is…`, `Seeds/Random.Boxes`, `test_a_box`"
        self.assertEqual(check(f"{names}, `test_box.py`, `save`, `a.b`\n"), (0, []))

    def test_tests_that_do_not_exist_are_reported_with_their_lines(self):
        names = ["Box.IsFull", "Crate.*", "Box.Full…", "test_inner", "test_crate.py"]
        expected = [
            f"docs/incidents.md:{line}: there is no test {name}"
            for line, name in enumerate(names, 1)
        ]
        self.assertEqual(check("".join(f"`{name}`\n" for name in names)), (1, expected))

    def test_source_files_that_the_architecture_names_exist(self):
        names = "`Box.*`, `geometry/box_test.cc`, `box_test.cc`, `crate.cc`, `state/box_test.cc`"
        expected = [
            f"ARCHITECTURE.md:1: there is no file {name}"
            for name in ("crate.cc", "state/box_test.cc")
        ]
        self.assertEqual(check(f"{names}\n", "ARCHITECTURE.md"), (1, expected))

    def test_documents_without_a_quoted_test_are_a_mistake(self):
        self.assertEqual(check("`save`\n"), (1, ["the documents quote no test"]))


if __name__ == "__main__":
    unittest.main()
