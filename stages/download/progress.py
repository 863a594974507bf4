"""Progress in bytes with the rate, told from several threads but not more often than anyone can look."""

from __future__ import annotations

import threading
import time

from stages.core.contract import StageContext

INTERVAL_S = 0.5
MIB = 1 << 20


class Progress:
    """Counts bytes towards a total."""

    def __init__(self, context: StageContext, total_bytes: int) -> None:
        self._context = context
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._started_s = self._told_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes that arrived; negative when they are thrown away."""
        with self._lock:
            self._done_bytes += num_bytes
            now_s = time.monotonic()
            if now_s - self._told_s >= INTERVAL_S or self._done_bytes == self._total_bytes:
                self._told_s = now_s
                rate = self._done_bytes / MIB / max(now_s - self._started_s, 1e-9)
                self._context.progress(self._done_bytes, self._total_bytes, "B", f"{rate:.1f} MiB/s")
