"""`oomb bench offload`: what it derives from two measured ways, and that it measures both."""

import json

import pytest
from test_bench import in_this_process, invoke  # noqa: F401

from oomb.bench.offload import GIB, OFFLOADED, RESIDENT, failed, growth, row

WORDS = ["offload", "--shape", "tiny", "--layers", 1, "--chunk", 16, "--page", 8, "--device", "cpu"]
WORDS += ["--lengths", "48,64", "--seconds", 0, "--grad-dtype", "fp32"]


def figures(seconds, **changes):
    return {
        "tokens_per_s": 100 / seconds,
        "step_seconds": [seconds, seconds],
        "peak_gib": 10.0,
        "loss": 2.0,
        "grad_norm": 3.0,
        "host_gib": 4.04,
        "planned_host_gib": 4.0,
        "recorded": {
            "seconds": seconds,
            "hidden_share": 0.9,
            "copy_in": {"seconds": 3.0, "gib": 1.0},
            "copy_out": {"seconds": 1.0, "gib": 1.0},
        },
        **changes,
    }


def test_two_ways_are_compared():
    found = row({RESIDENT: figures(10.0), OFFLOADED: figures(10.2)})
    assert found["time_ratio"] == pytest.approx(1.02)
    assert found["hidden_share"] == 0.9
    assert found["hidden_by_difference"] == pytest.approx(1 - 0.2 / 4)
    assert found["held_over_planned"] == pytest.approx(1.01)
    assert found["agrees"] is True
    assert not failed({"rows": [found]})


@pytest.mark.parametrize("wrong", [{"loss": 2.02}, {"grad_norm": 2.9}])
def test_ways_that_disagree_fail(wrong):
    found = row({RESIDENT: figures(10.0), OFFLOADED: figures(10.0, **wrong)})
    assert found["agrees"] is False
    assert failed({"rows": [found]})


def test_what_cannot_be_told_is_none():
    for resident in ({"failed": "out of memory"}, None):
        ways = {OFFLOADED: figures(10.0)} | ({RESIDENT: resident} if resident else {})
        found = row(ways)
        assert (found["time_ratio"], found["agrees"]) == (None, None)
        assert found["hidden_share"] == 0.9
        assert not failed({"rows": [found]})
    found = row({RESIDENT: figures(10.0), OFFLOADED: {"failed": "exit code -9"}})
    assert (found["time_ratio"], found["hidden_share"]) == (None, None)
    assert failed({"rows": [found]})


def test_an_estimate_has_no_step_to_take_a_difference_of():
    estimate = {"estimated": "yes", "loss": None}
    found = row({RESIDENT: figures(1.0, **estimate), OFFLOADED: figures(1.0, **estimate)})
    assert (found["hidden_by_difference"], found["agrees"]) == (None, None)
    assert found["time_ratio"] == 1


def test_growth_is_mb_per_ten_thousand_tokens():
    peaks = [(20_000, 1e9), (40_000, 1.003e9), (50_000, None)]
    rows = [
        {"tokens": tokens, OFFLOADED: {"peak_gib": None if peak is None else peak / GIB}}
        for tokens, peak in peaks
    ]
    assert growth(rows) == [pytest.approx(1.5), None]


def test_both_ways_are_measured_and_one_step_is_recorded(tmp_path, in_this_process):  # noqa: F811
    path = tmp_path / "offload.json"
    result = invoke(*WORDS, "--out", path)
    assert result.exit_code == 0, result.output
    assert "simulated: threads stand for the copy engines" in result.stdout
    rows = json.loads(path.read_text())["rows"]
    for found in rows:
        assert found["agrees"] is True
        assert found["resident"]["host_gib"] == 0 < found["offloaded"]["host_gib"]
        assert found["resident"]["recorded"]["hidden_share"] is None
        assert found["held_over_planned"] == 1
        assert found["hidden_share"] <= 1
    page = 2 * 8 * 2 * 32 * 4 / GIB  # K and V, tokens, heads, dim, fp32
    first, second = (found["offloaded"]["recorded"]["copy_in"]["gib"] for found in rows)
    assert first / page == pytest.approx(round(first / page)) and 0 < first < second


def test_the_offloaded_way_alone_and_sampled(tmp_path, in_this_process):  # noqa: F811
    path = tmp_path / "offload.json"
    result = invoke(*WORDS, "--no-resident", "--sample", "--out", path)
    assert result.exit_code == 0, result.output
    assert "estimated from sampled chunks" in result.stdout and "not run" in result.stdout
    for found in json.loads(path.read_text())["rows"]:
        assert "resident" not in found and found["time_ratio"] is None
        assert found["offloaded"]["recorded"]["copy_out"]["gib"] > 0


def test_bad_input_is_refused():
    result = invoke("offload", "--device", "cpu", "--shape", "tiny", "--ring-depth", 1)
    assert result.exit_code == 2
    assert "ring_depth" in result.output
