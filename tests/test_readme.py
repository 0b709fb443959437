"""The README says what was measured, and shows what is there."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import oomb
from oomb.bench.table import pages_table, step_table
from oomb_assets import demo_model_dir

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "assets" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_is_the_recorded_one():
    names = ("", "fast_32k_", "64k_live_", "128k_", "256k_", "fast_256k_")
    reports = [RESULTS / f"step_{name}h200.json" for name in names]
    assert step_table(reports) in README
    for report in map(json.loads, map(Path.read_text, reports)):
        assert f"{report['gpu']}, {report['date']}, torch {report['torch']}, " in README
        assert f"transformers {report['transformers']}." in README
        assert report["settings"]["policy"] == "keep"
        assert all(row["agrees"] for row in report["rows"])


def test_no_test_that_needs_a_gpu_failed_on_one():
    record = json.loads((RESULTS / "gpu_tests_h200.json").read_text())
    assert record["failed"] == 0 and record["passed"] > 150


def test_numbers_around_the_table_are_the_recorded_ones():
    exact = json.loads((RESULTS / "agreement_fp32_h200.json").read_text())
    row = exact["rows"][0]
    assert f"{100 * row['error']:.2f} % for OOMB" in README
    assert f"{100 * row['error_ordinary']:.2f} % for transformers" in README
    machine = f"{exact['gpu']}, {exact['date']}, torch {exact['torch']}"
    assert machine in README.replace("\n", " ")


def test_what_low_precision_pages_cost_is_recorded():
    report = json.loads((RESULTS / "pages_cpu.json").read_text())
    assert pages_table(report) in README
    assert [row["chunks"] for row in report["rows"][::4]] == [4, 16, 64]
    where = f"{report['date']}, torch {report['torch']}, transformers {report['transformers']}"
    assert where in README and f"over {report['settings']['context']:,} tokens" in README
    for option in {row["option"] for row in report["rows"]}:  # what the text says
        errors = [r["parameters"]["all"]["error"] for r in report["rows"] if r["option"] == option]
        assert errors == sorted(errors)
    stochastic, nearest = (
        next(row for row in report["rows"] if row["option"] == name and row["chunks"] == 64)
        for name in ("bf16 page gradients", "bf16 page gradients, to nearest")
    )
    errors = [row["parameters"]["all"]["error"] for row in (nearest, stochastic)]
    assert errors[0] < errors[1]


def test_every_local_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)|src(?:set)?=\"([^\"]+)\"", README)
    targets = [a or b for a, b in links]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_five_line_example_runs():
    """As printed, with the shipped model in the reader's folder."""
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    assert len(code.strip().splitlines()) == 5
    ids = torch.randint(0, 2048, (1, 40))
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "torch": torch, "oomb": oomb}
    names |= {"folder": demo_model_dir(), "input_ids": ids}
    exec(code, names)
    before = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32)
    assert float(names["result"].loss) == pytest.approx(
        float(before(ids, labels=ids).loss.detach())
    )
    changed = zip(names["model"].parameters(), before.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in changed)
