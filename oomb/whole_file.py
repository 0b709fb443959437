"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Somewhere beside a path to write its file; it takes the path's name when the block ends.

    Args:
        path: the file to write; an existing one is replaced. It stays as it is if the block raises.

    Yields:
        The path to write to.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
