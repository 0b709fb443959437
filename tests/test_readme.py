"""The README says what was measured, and shows what is there."""

import re
from pathlib import Path

from oomb.bench.table import agreement_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_is_the_recorded_one():
    assert agreement_table(ROOT / "assets" / "results" / "agreement_h200.json") in README


def test_numbers_around_the_table_are_the_recorded_ones():
    from json import loads

    exact = loads((ROOT / "assets" / "results" / "agreement_fp32_h200.json").read_text())
    row = exact["rows"][0]
    assert f"{100 * row['error']:.2f} % for OOMB" in README
    assert f"{100 * row['error_ordinary']:.2f} % for transformers" in README
    machine = f"{exact['gpu']}, {exact['date']}, torch {exact['torch']}"
    assert machine in README.replace("\n", " ")


def test_every_local_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)|src(?:set)?=\"([^\"]+)\"", README)
    targets = [a or b for a, b in links]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_five_line_example_runs():
    """As printed, with a tiny model in the place of the reader's."""
    import torch
    from helpers import tiny_model

    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    assert len(code.strip().splitlines()) <= 6
    model = tiny_model("llama", torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    names = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "input_ids": torch.randint(0, 97, (1, 40)),
    }
    exec(code, names)
    assert float(names["result"].loss) > 0
    changed = zip(model.parameters(), before, strict=True)
    assert not any(torch.equal(a, b) for a, b in changed)
