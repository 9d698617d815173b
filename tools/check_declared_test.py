"""Tests of tools/check_declared: it accepts good trees, and reports a missing include at its use."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).parent / "check_declared"
HEADER = """#pragma once
namespace tilestone {
// made_up(2) is only an example.
constexpr int kDepth = 3;
class Thing {
 public:
  int size() const;
};
int made_up(int depth);
}  // namespace tilestone
"""


def check(files: dict[str, str]) -> list[str]:
    """Runs the tool over a tree of these files. Returns the output lines."""
    with tempfile.TemporaryDirectory() as root:
        for name, text in files.items():
            path = pathlib.Path(root, "tilestone", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        result = subprocess.run(
            [sys.executable, TOOL, "--root", root], capture_output=True, text=True, check=False
        )
    assert not result.stderr, result.stderr
    assert result.returncode == (1 if result.stdout else 0)
    return result.stdout.splitlines()


def violation(line: int, name: str) -> str:
    return f"tilestone/b.cc:{line}: uses {name} without including tilestone/a.h"


class CheckDeclaredTest(unittest.TestCase):
    def test_a_use_without_the_include_is_reported_once_at_its_first_line(self):
        for name, use in (("made_up", "made_up(1)"), ("kDepth", "kDepth"), ("Thing", "Thing()")):
            source = f"int f() {{\n  g({use});\n  return h({use});\n}}\n"
            self.assertEqual(check({"a.h": HEADER, "b.cc": source}), [violation(2, name)])

    def test_an_include_through_another_header_is_enough(self):
        files = {
            "a.h": HEADER,
            "c.h": '#include "tilestone/a.h"\n',
            "b.cc": '#include "tilestone/c.h"\nint f() { return made_up(kDepth); }\n',
        }
        self.assertEqual(check(files), [])

    def test_any_header_that_declares_the_name_will_do(self):
        files = {
            "a.h": HEADER,
            "c.h": "class Thing;\n",
            "b.cc": '#include "tilestone/c.h"\nvoid f(Thing& thing) {}\n',
        }
        self.assertEqual(check(files), [])

    def test_comments_strings_members_and_names_of_their_own_are_no_uses(self):
        source = """// made_up(1) and Thing
const char* text = "made_up(1)" R"(kDepth
Thing)";
enum class Kind { kDepth, kWidth };
int f(int made_up) { return other.made_up(1) + made_up; }
TEST(Thing, IsTested) {}
struct Outer {
  class Thing {};
};
"""
        self.assertEqual(check({"a.h": HEADER, "b.cc": source}), [])


if __name__ == "__main__":
    unittest.main()
