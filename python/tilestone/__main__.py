"""The command `tilestone`, or `python -m tilestone`: the same program as the C++ one."""

from __future__ import annotations

import os
import signal
import sys

from tilestone import _core


def main() -> int:
    """Runs the command line; returns its exit code."""
    # Ctrl-C or a closed pipe ends the process at once, as in the C++ program. A repair, which has
    # something to clean up, handles signals itself.
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    return _core.cli([b"tilestone", *map(os.fsencode, sys.argv[1:])])


if __name__ == "__main__":
    sys.exit(main())
