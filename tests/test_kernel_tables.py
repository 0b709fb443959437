"""What was measured of the kernels, and what is said of it."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from oomb.bench import cells, ladder

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "assets" / "results"


def test_the_ladder_is_the_recorded_one():
    report = json.loads((RESULTS / "kernel_ladder_h200.json").read_text())
    page = ROOT / "oomb" / "attention" / "impl" / "triton" / "ladder.md"
    assert page.read_text() == ladder.render(report)
    assert [(r["way"], r["name"]) for r in report["rungs"]] == [
        (rung.way, rung.name) for rung in ladder.RUNGS
    ]


def test_every_cell_is_recorded_and_right():
    report = json.loads((RESULTS / "kernel_cells_h200.json").read_text())
    recorded = [
        tuple(row[k] for k in ("dtype", "head_dim", "page", "mask")) for row in report["cells"]
    ]
    assert recorded == [(c.dtype, c.head_dim, c.page, c.mask) for c in cells.cells()]
    assert len(recorded) == 180
    assert all(row["right"] for row in report["cells"])
    table = cells.table(report)
    assert len(table.splitlines()) == 2 + 15
    counted = Counter(row.get("fast_enough") for row in report["cells"])
    assert counted[True] + counted[False] == 90  # 16 bits, pages of 64 and more


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        # 8 queries over 16 tokens of history and themselves
        ("dense", 8 * 16 + 36),
        ("window", 8 * 8),
        # documents begin at 0, 23, 25 and 27 of 24 tokens: the first holds 7 of the queries
        ("documents", 7 * 16 + 28 + 1),
    ],
)
def test_pairs_by_hand(mask, pairs, monkeypatch):
    monkeypatch.setattr(cells, "DEVICE", torch.device("cpu"))
    problem = cells.Problem(cells.Cell("fp32", 64, 8, mask), (8, 2))
    assert problem.pairs() == pairs
