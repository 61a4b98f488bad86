"""How often a request to a server is repeated, and how long to wait in between."""

import time

ATTEMPTS = 4
"""Requests in all, when each fails for a reason that may pass."""

PAUSE_SECONDS = 0.5


def pause(attempt: int) -> None:
    """Wait after the failed ``attempt`` (1 for the first): 1 s, 2 s, 4 s."""
    time.sleep(PAUSE_SECONDS * 2**attempt)
