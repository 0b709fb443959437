"""`oomb bench pages`: it compares what it says it compares."""

import json

import pytest
import torch
from helpers import tiny_model
from typer.testing import CliRunner

from oomb.bench import pages
from oomb.cli import app

CPU = torch.device("cpu")


def invoke(*words):
    return CliRunner().invoke(app, ["bench", "pages", *map(str, words)])


def test_a_small_run(tmp_path):
    path = tmp_path / "pages.json"
    words = "--context 192 --chunks 3,6 --page 16 --device cpu"
    result = invoke("--out", path, *words.split())
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["command"].startswith("oomb") and report["date"] and report["torch"]
    rows = {(row["option"], row["chunks"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 2 * len(pages.OPTIONS)
    for (option, _), row in rows.items():
        low, high = row["page_bytes_per_token"], row["page_bytes_per_token_full"]
        # 4 layers of 2 heads of 16 numbers for K and V; per page, head, K and V two scales of 4.
        assert high == 2 * 4 * 2 * 2 * 16 * 4
        keys = 256 + 4 * 2 * 2 * 8 / 16 if option.startswith("fp8") else 1024
        assert low == keys + (512 if "bf16" in option else 1024)
        for group in (row["parameters"], row["page_gradients"]):
            for figures in group.values():
                least, most = (1e-3, 0.5) if option.startswith("fp8") else (1e-6, 1e-2)
                assert least < figures["error"] < most
                assert figures["cosine"] == pytest.approx(1 - figures["error"] ** 2 / 2, abs=0.02)
    assert all(option in result.output for option in pages.OPTIONS)


def test_full_precision_has_no_error_and_page_gradients_are_the_models():
    """Against the model run whole: of every layer's projections, but in the last chunk."""
    model, ids = tiny_model("llama", torch.float32), torch.randint(1, 97, (1, 48))
    settings = pages.PagesSettings(48, [4], 4, CPU)
    step = pages._step(model, ids, settings, 4)
    again = pages._step(model, ids, settings, 4)
    assert all(each["error"] == 0 for each in pages._errors(again, step)["parameters"].values())
    found = {}

    def watch(name):
        def collect(_module, _inputs, out):
            out.register_hook(lambda grad: found.update({name: grad[:, :36]}))

        return collect

    for name, module in model.named_modules():
        if name.endswith(("k_proj", "v_proj")):
            module.register_forward_hook(watch(name))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for kind, word in pages.PAGES.items():
        expected = [found[name] for name in found if word in name][::-1]  # first layer first
        chunks = [part for grad in expected for part in reversed(grad.split(12, dim=1))]
        expected = torch.cat([part.flatten() for part in chunks])
        torch.testing.assert_close(step.pages[kind], expected, rtol=1e-4, atol=1e-7)
    assert set(step.parameters) == {*pages.GROUPS, "all"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--chunks", "1"), "--chunks must be at least 2, got 1"),
        (("--chunks", "none"), "--chunks must name at least one number of chunks"),
        (("--context", 1000), "must be a multiple of --chunks 4 times --page, got 1000 and 512"),
        (("--context", 0), "--context must be at least 8192, got 0"),
        (("--page", 0), "--page must be at least 1, got 0"),
        (("--context", 8192 * 100), "--context must be at most the text's"),
        (("--out", "/nowhere/x.json"), "there is no folder"),
    ],
)
def test_bad_input_is_refused(words, said):
    result = invoke(*words, "--device", "cpu")
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
