"""Notebook 04's pictures and exercise."""

import json

import pytest
import torch

import oomb_widgets as show
from oomb.bench import ladder
from oomb_assets import results_dir
from oomb_widgets import judge

LADDER = json.loads((results_dir() / "kernel_ladder_h200.json").read_text())
SHARED = 227 * 1024


def right(queries, keys, stages, dim):
    return SHARED // (2 * queries * dim + stages * 4 * keys * dim)


def test_the_right_count_of_programs_passes():
    verdict = judge("programs", right)
    assert verdict.passed
    assert right(128, 64, 2, 128) == 2  # what the notebook says of the shipped tile
    assert right(128, 64, 3, 128) == 1  # of the rung before it
    assert right(64, 64, 3, 128) == 2  # and of the third


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (
            lambda q, k, s, d: SHARED // (2 * q * d + s * 2 * k * d),
            "one of K and one of V|tile of K",
        ),
        (lambda q, k, s, d: SHARED // (s * 4 * k * d), "block of queries|K and one of V"),
        (lambda q, k, s, d: SHARED / (2 * q * d + s * 4 * k * d), "fraction"),
        (lambda q, k, s, d: 7, "Add up bytes"),
        (lambda q, k, s, d: None, "Not yet"),
    ],
)
def test_wrong_counts_are_told_why(wrong, why):
    verdict = judge("programs", wrong)
    assert not verdict.passed
    assert any(part in verdict.message for part in why.split("|")), verdict.message


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_the_ladder_shows_every_rung_and_the_guess(way):
    picture = show.kernel_ladder(LADDER, way)
    names = [rung["name"] for rung in LADDER["rungs"] if rung["way"] == way]
    assert all(name in picture.alt for name in [*names, "cuDNN", "matrix product"])
    assert show.kernel_ladder(LADDER, way, guess=300.0).png != picture.png


def test_the_page_table_is_drawn_and_told():
    picture = show.page_lookup([2, 0], 3)
    assert (
        picture.alt
        == "The page table of 2 pages in a pool of 3: page 0 in slot 2, page 1 in slot 0."
    )
    assert picture.png[:4] == b"\x89PNG"


def test_the_ladders_shipped_tiles_are_those_of_the_kernels():
    configs = pytest.importorskip("oomb.attention.impl.triton.configs", reason="needs Triton")
    for kernel in configs.KERNELS:
        tile = configs.tiles(kernel, configs.HOPPER, torch.bfloat16, ladder.HEAD_DIM)[0]
        assert (tile.queries, tile.keys, tile.warps, tile.stages) == ladder.SHIPPED[kernel]
