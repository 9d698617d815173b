"""The `tilestone` command of the Python package; the same program as the C++ one."""

from __future__ import annotations

import signal
import sys

from tilestone import _core


def main() -> int:
    """Runs the command line; returns its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to clean up: end at once, as C++ does
    return _core.cli(["tilestone", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
