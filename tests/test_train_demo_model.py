"""The script that trains the shipped model, on a little of its text."""

import json
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oomb.train import demo_model
from oomb_assets import demo_text


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Six steps on a few thousand tokens: the report and the folder written."""
    out = tmp_path_factory.mktemp("train") / "model"
    arguments = ["--out", str(out), "--device", "cpu", "--steps", "6", "--evaluations", "3"]
    arguments += ["--batch-tokens", "256", "--longest", "128", "--vocab", "400", "--lr", "0.002"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "demo_text", lambda part: demo_text(part)[:20_000])
        report = demo_model.train(demo_model.parse_args(arguments))
    return report, out


def test_it_writes_a_folder_that_transformers_reads(trained):
    report, out = trained
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.float16
    assert model.num_parameters() == report["parameters"]
    assert len(tokenizer) == model.config.vocab_size == 400
    assert json.loads((out / "training.json").read_text()) == report


def test_it_learns_and_reports_how_far(trained):
    report = trained[0]
    assert [entry["step"] for entry in report["curve"]] == [2, 4, 6]
    validation = [entry["validation"] for entry in report["curve"]]
    assert validation[-1] < validation[0]
    assert report["best_step"] == report["curve"][validation.index(min(validation))]["step"]
    assert report["command"].startswith("python -m oomb.train.demo_model")
    assert {"python", "torch", "transformers", "oomb"} == set(report["versions"])


def test_held_out_losses_are_those_of_the_written_weights(trained):
    """Window by window, by transformers, every token from each window's third on."""
    report, out = trained
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.tensor(AutoTokenizer.from_pretrained(out)(demo_text("heldout")[:20_000]).input_ids)
    assert len(ids) == report["tokens"]["heldout"]
    losses = []
    with torch.no_grad():
        for window in ids.split(128):
            logits = model(window[None]).logits[0, 1:-1]
            losses.append(torch.nn.functional.cross_entropy(logits, window[2:], reduction="none"))
    assert report["heldout_loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


def test_windows_start_anywhere_and_cover_the_end():
    tokens, generator = torch.arange(10), torch.Generator().manual_seed(0)
    rows = demo_model.random_windows(tokens, 8, 200, generator)
    assert {int(row[0]) for row in rows} == {0, 1, 2}
    assert all(torch.equal(row, torch.arange(8) + row[0]) for row in rows)


@pytest.mark.parametrize(("length", "sizes"), [(10, [10]), (4, [4, 4]), (5, [5, 5]), (7, [7, 3])])
def test_cut_leaves_out_only_a_tail_too_short_to_score(length, sizes):
    windows = list(demo_model.cut(torch.arange(10), length))
    assert [window.shape for window in windows] == [(1, size) for size in sizes]
    assert torch.equal(torch.cat(windows, 1)[0], torch.arange(sum(sizes)))


def test_the_learning_rate_warms_up_and_decays():
    rates = [demo_model.learning_rate(i / 1000, 1.0) for i in range(1001)]
    top = rates.index(max(rates))
    assert max(rates) == pytest.approx(1.0) and top == 20
    assert rates[0] > 0
    assert all(a < b for a, b in pairwise(rates[1 : top + 1]))
    assert all(a > b for a, b in pairwise(rates[top:]))
    assert rates[-1] == pytest.approx(0.02)
