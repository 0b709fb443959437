"""The timeline in a browser: ES modules without dependencies, and the colours that pictures share.

`timeline.js` is the module that pages load; `encoding.json` names colours, labels, families of
stages and lanes, for it and for pictures drawn in Python.
"""

from __future__ import annotations

import re
from importlib import resources

_IMPORT = re.compile(
    r'^import (?P<what>\{[^}]*\}|\w+) from "\./(?P<file>[\w.]+)"(?: with \{[^}]*\})?;\n',
    re.MULTILINE,
)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const))", re.MULTILINE)


def module_source(entry: str = "timeline.js") -> str:
    """One ES module with everything that `entry` imports, for pages that load no further file.

    Args:
        entry: a module of this folder.

    Returns:
        Its text after that of the modules it imports; only the entry's names are exported.
    """
    texts: dict[str, str] = {}
    _collect(entry, texts)
    own = texts.pop(entry)
    return "".join(_EXPORT.sub("", text) for text in texts.values()) + own


def _collect(file: str, texts: dict[str, str]) -> None:
    """Add a file's text without its imports, after the texts of the files that it imports."""
    text = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
    for found in _IMPORT.finditer(text):
        if found["file"].endswith(".json"):
            data = resources.files(__package__).joinpath(found["file"]).read_text(encoding="utf-8")
            texts[found["file"]] = f"const {found['what']} = {data.strip()};\n"
        elif found["file"] not in texts:
            _collect(found["file"], texts)
    texts[file] = _IMPORT.sub("", text)
