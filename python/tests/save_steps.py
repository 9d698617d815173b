"""The steps of a save, taken in another thread than the one that has begun it."""

from __future__ import annotations

import threading
from typing import Any


def finish_in_a_thread(begun: Any) -> None:
    def finish() -> None:
        begun.stage()
        begun.write()
        begun.report()
        begun.publish()

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join()
