"""Keep a system alive whose memory CPU and GPU share (GB10): the limit of a container, the guard in it, and the page cache.

The kernel's OOM killer cannot reclaim what the driver allocated for the GPU: an engine that takes too much freezes the machine
(vllm-project/vllm#46307, #56824; eugr/spark-vllm-docker#321). Whether memory of the GPU counts toward the limit of a container
is unverified on GB10, so that the limit is what the whole container may have, and the guard watches the system.
"""

import os
import shlex
from pathlib import Path

from sm120kit.core.errors import SystemRefused

RESERVE = 6 * 2**30
"""Bytes that an engine leaves beside weights and KV cache: for its processes, CUDA graphs, the container daemon, and logins."""
GUARD = 2 * 2**30
"""Available bytes below which the guard stops the engine."""
KILL_SECONDS = 5
"""Time between SIGTERM and SIGKILL of the guard: an engine that ends takes no more memory, a hanging one might."""
MEMINFO = Path("/proc/meminfo")
"""Of the host, also in a container (Linux, Documentation/filesystems/proc.rst)."""
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
STOPPED = "sm120kit stops the server before the system freezes"
"""The start of the guard's message, by which a rule for logs finds it."""


def limit(memory: int) -> int:
    """The bytes that a container may use, of a host's ``memory`` in bytes."""
    return memory - RESERVE


def guarded(meminfo: Path = MEMINFO, least: int = GUARD) -> str:
    """A shell script that becomes the server of its arguments, and stops it when fewer than ``least`` bytes are available.

    A subshell reads ``meminfo`` every second, without other programs than ``sleep``. ``$$`` in it is the server.
    """
    read = f'while read -r name available unit; do [ "$name" = MemAvailable: ] && break; done < {shlex.quote(str(meminfo))}'
    enough = f'[ "${{available:-{least >> 10}}}" -ge {least >> 10} ]'
    message = f'echo "{STOPPED}: $((available / 1024)) MiB of memory are available, the least is {least >> 20}"'
    stop = f"{{ {message}; kill -TERM $$; sleep {KILL_SECONDS}; kill -KILL $$; exit; }}"
    return f"(while sleep 1 && kill -0 $$ 2>/dev/null; do {read}; {enough} || {stop}; done) & "


def drop_page_cache(control: Path = DROP_CACHES) -> None:
    """Write what is dirty to disk and drop the page cache, which the driver of GB10 does not count as free memory.

    Raises:
        SystemRefused: only root may.
    """
    os.sync()
    try:
        control.write_text("3\n")
    except OSError as error:
        raise SystemRefused(
            f"the page cache cannot be dropped: {control}: {error.strerror}",
            "run `sync; echo 3 | sudo tee /proc/sys/vm/drop_caches`, and serve without --drop-caches",
        ) from error
