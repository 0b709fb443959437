"""The kernels compile for chips that are not here, and fit into them."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs Triton")

from oomb.attention.impl.triton.builds import CHIPS, KERNELS, builds, sample

SEED = 0


def test_every_kernel_is_built_for_every_chip():
    """3 dtypes x 5 head dims x (4 pages x 2 masks, and 3 masks of the own chunk)."""
    everything = builds()
    assert len(everything) == len(set(everything)) == 3 * 5 * (4 * 2 + 3) * len(KERNELS) * 3
    chosen = sample(SEED)
    default = [b for b in chosen if (b.dtype, b.head_dim, b.page) == ("bf16", 128, 128)]
    assert {(b.kernel, b.chip) for b in default} == {(k, c) for k in KERNELS for c in CHIPS}
    assert len(chosen) >= len(everything) // 10


@pytest.mark.slow
def test_the_default_kernels_and_a_tenth_of_the_others_fit(tmp_path):
    """164 of 1485 builds, in processes of their own: here kernels may be interpreted."""
    out = tmp_path / "builds.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "oomb.attention.impl.triton.builds"]
    command += ["--sample", str(SEED), "--jobs", "2", "--out", str(out)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    rows = json.loads(out.read_text())["builds"]
    assert len(rows) == len(sample(SEED))
    for row in rows:
        assert row["shared"] <= CHIPS[row["chip"]], row
        assert 0 < row["registers"] <= 255, row
        if (row["chip"], row["dtype"], row["head_dim"]) == (90, "bf16", 128):  # what was tuned
            assert row["spilled"] <= 512, row
