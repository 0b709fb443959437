"""What Linux says of the host's memory."""

from __future__ import annotations

import re
from pathlib import Path


def meminfo(name: str) -> int | None:
    """Bytes of one entry of /proc/meminfo, such as MemTotal; None where there is none."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
