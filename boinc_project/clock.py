"""What time it is, as the daemons and the embedded server see it: the one place that they ask.

The simulator puts a time of its own here, so that the same code decides about weeks of volunteers' work in seconds.
How long something takes on this computer (time.monotonic) is asked elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_read: Callable[[], float] = time.time


def now() -> float:
    """Seconds since 1970."""
    return _read()


@contextmanager
def virtual(read: Callable[[], float]) -> Iterator[None]:
    """Within the block, `now` gives what `read` gives, in all threads of this process."""
    global _read
    before, _read = _read, read
    try:
        yield
    finally:
        _read = before
