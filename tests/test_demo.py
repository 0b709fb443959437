"""`oomb demo` as a person runs it: figures, exit codes, refused input, files whole or absent."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import oomb
from oomb.cli import app
from oomb.demo import compare
from oomb_assets import demo_model_dir, demo_text

SMALL = ["--context", "384", "--chunk", "64", "--page", "16", "--steps", "2", "--device", "cpu"]


def run_demo(*args):
    return CliRunner().invoke(app, ["demo", *map(str, args)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run with the shipped model at a small context: its result and the folder it wrote in."""
    folder = tmp_path_factory.mktemp("demo")
    # 384 tokens say less about the text than a default step's 16K: a smaller step for them
    files = ["--json", folder / "demo.json", "--out", folder / "run.oomb"]
    result = run_demo(*SMALL, "--lr", 1e-4, *files)
    assert result.exit_code == 0, result.output
    return result, folder


def test_it_tells_the_story(finished):
    result, folder = finished
    figures = json.loads((folder / "demo.json").read_text())
    worst = figures["gradients"]["largest_relative_difference"]
    for part in (
        "384 tokens",
        f"{figures['held_out']['loss_before']:.4f}",
        f"{figures['held_out']['loss_after']:.4f}",
        f"{worst:.1e}",
        figures["gradients"]["of"],
        str(folder / "run.oomb"),
    ):
        assert part in result.stdout
    assert "\x1b" not in result.stdout  # no colours or bars outside of a terminal


def test_json_has_the_figures(finished):
    figures = json.loads((finished[1] / "demo.json").read_text())
    assert (figures["context"], figures["chunk"], figures["page"]) == (384, 64, 16)
    assert len(figures["train_losses"]) == figures["steps"] == 2
    assert figures["held_out"]["tokens"] == 384
    assert figures["held_out"]["loss_after"] < figures["held_out"]["loss_before"]
    gradients = figures["gradients"]
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32)
    assert set(gradients["by_parameter"]) == {name for name, _ in model.named_parameters()}
    assert gradients["largest_relative_difference"] == max(gradients["by_parameter"].values())
    assert 0 < gradients["largest_relative_difference"] <= 1e-5
    assert gradients["within_limit"] and gradients["length"] == 384
    live = figures["live_bytes"]
    assert live["by_chunks"]["activations"] < live["whole"]["activations"] / 2
    # K and V of every chunk but the last: 5 * 64 tokens, in fp32.
    config = model.config
    per_token = 2 * config.num_key_value_heads * config.head_dim * 4 * config.num_hidden_layers
    assert live["by_chunks"]["kv_pages"] >= 5 * 64 * per_token
    assert len(figures["seconds"]["by_chunks"]) == 2


def test_losses_are_those_of_transformers(finished):
    figures = json.loads((finished[1] / "demo.json").read_text())
    inputs = demo_inputs(context=384)
    with torch.no_grad():
        held_out = inputs.model(inputs.held_out[None], labels=inputs.held_out[None]).loss
        first = inputs.model(inputs.train[None, :384], labels=inputs.train[None, :384]).loss
    assert figures["held_out"]["loss_before"] == pytest.approx(float(held_out), rel=1e-5)
    assert figures["train_losses"][0] == pytest.approx(float(first), rel=1e-5)
    assert figures["gradients"]["loss_by_chunks"] == figures["train_losses"][0]


def test_the_recording_opens_and_has_every_step(finished):
    recording = oomb.load_recording(finished[1] / "run.oomb")
    assert recording.header["notes"]["made_by"] == "oomb demo"
    assert recording.header["notes"]["gradients"]["within_limit"] is True
    sweeps = recording.columns["phase"] == recording.header["phases"].index("sweep")
    assert set(recording.columns["chunk"][sweeps]) >= set(range(6))
    assert sorted(p.name for p in finished[1].iterdir()) == ["demo.json", "run.oomb"]


def demo_inputs(**options):
    from oomb.demo.inputs import DemoOptions, load

    return load(DemoOptions(chunk=64, page=16, device="cpu", **options))


def test_names_are_shown_as_they_are(tmp_path):
    folder = tmp_path / "[bold]"
    folder.mkdir()
    path = folder / "story[1].txt"
    path.write_text(demo_text("heldout")[:3000], encoding="utf-8")
    args = ("--text", path, "--out", folder / "run.oomb", "--device", "cpu")
    result = run_demo("--context", 64, "--chunk", 64, "--page", 16, "--steps", 1, *args)
    assert result.exit_code == 0, result.output
    for name in (str(path), "the end of story[1].txt", str(folder / "run.oomb")):
        assert name in result.stdout


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(demo_text("heldout")[:6000], encoding="utf-8")
    return path


def test_own_text_and_model(text_file, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(demo_model_dir(), model)
    out = tmp_path / "run.oomb"
    args = ("--text", text_file, "--model", model, "--json", tmp_path / "a.json", "--out", out)
    result = run_demo("--context", 200, "--chunk", 64, "--page", 16, "--steps", 1, *args)
    assert result.exit_code == 0, result.output
    assert "story.txt" in result.stdout
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["model"]["path"] == str(model)
    assert figures["text"] == {"train": str(text_file), "held_out": "the end of story.txt"}


def test_the_tail_of_an_own_text_is_never_trained_on(text_file):
    inputs = demo_inputs(text=text_file, context=256)
    tokens = len(inputs.train) + len(inputs.held_out)
    assert len(inputs.held_out) == tokens // 8
    from transformers import AutoTokenizer

    whole = AutoTokenizer.from_pretrained(demo_model_dir())(text_file.read_text())["input_ids"]
    assert torch.cat((inputs.train, inputs.held_out)).tolist() == whole


@pytest.mark.parametrize("error", [1e-4, float("nan")])
def test_a_wrong_gradient_is_exit_code_1_and_is_named(tmp_path, monkeypatch, error):
    class WrongEngine(oomb.Engine):
        def __init__(self, model, config):
            super().__init__(model, config)
            self.weight = model.get_parameter("model.layers.2.mlp.up_proj.weight")

        def iter_step(self, *args, **kwargs):
            result = yield from super().iter_step(*args, **kwargs)
            self.weight.grad[3, 5] += error * self.weight.grad.norm()
            return result

    monkeypatch.setattr(oomb, "Engine", WrongEngine)
    result = run_demo(*SMALL, "--json", tmp_path / "a.json", "--out", tmp_path / "a.oomb")
    assert result.exit_code == 1, result.output
    assert "NOT the same gradients" in result.stdout
    gradients = json.loads((tmp_path / "a.json").read_text())["gradients"]
    assert gradients["of"] == "model.layers.2.mlp.up_proj.weight"
    expected = pytest.approx(error, rel=0.1) if error == error else None
    assert gradients["largest_relative_difference"] == expected
    assert gradients["within_limit"] is False


def test_where_the_whole_run_does_not_fit_a_shorter_one_is_compared(tmp_path, monkeypatch):
    inputs = demo_inputs(context=384)
    need = compare.whole_run_need(inputs.model, inputs.train)
    monkeypatch.setattr(compare, "memory_free", lambda device: int(need(192) / compare.USABLE) + 1)
    result = run_demo(*SMALL, "--json", tmp_path / "a.json", "--out", tmp_path / "a.oomb")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["gradients"]["length"] == figures["live_bytes"]["whole"]["length"] == 192
    assert figures["live_bytes"]["by_chunks"]["length"] == 384
    assert "384 tokens" in result.stdout and "192 tokens" in result.stdout
    assert len(figures["train_losses"]) == 2


def test_the_need_of_a_whole_run_is_foreseen():
    inputs = demo_inputs(context=2048)
    compare.zero_gradients(inputs.model)
    foreseen = compare.whole_run_need(inputs.model, inputs.train)(2048)
    compare.zero_gradients(inputs.model)
    with oomb.profiling.LiveBytes() as live:
        compare.whole_run(inputs.model, inputs.train[None, :2048])
    assert foreseen == pytest.approx(live.peak, rel=0.02)


def test_differences_that_are_not_numbers_count_as_infinite():
    one, zero = torch.ones(3), torch.zeros(3)
    differences = compare.relative_differences(
        {"same": one, "both zero": zero, "from zero": one, "ours only": one, "off": one * 1.5},
        {"same": one, "both zero": zero, "from zero": zero, "theirs only": one, "off": one},
    )
    infinite = float("inf")
    assert differences == {
        "same": 0, "both zero": 0, "off": pytest.approx(0.5),
        "from zero": infinite, "ours only": infinite, "theirs only": infinite,
    }  # fmt: skip
    nan = compare.relative_differences({"x": one * float("nan")}, {"x": one})
    assert nan == {"x": infinite}


@pytest.mark.parametrize("evaluations_before", [0, 1])
def test_ctrl_c_leaves_no_file(tmp_path, monkeypatch, evaluations_before):
    evaluate, calls = oomb.Engine.evaluate, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) > evaluations_before:
            raise KeyboardInterrupt
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(oomb.Engine, "evaluate", interrupted)
    result = run_demo(*SMALL, "--json", tmp_path / "a.json", "--out", tmp_path / "a.oomb")
    assert result.exit_code == 130
    assert "Stopped before the end" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    args = ["--context", 4096, "--steps", 1, "--json", tmp_path / "a.json"]
    result = run_demo(*args, "--out", tmp_path / "a.oomb")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["device"] == torch.cuda.get_device_name()
    assert 0 < figures["gradients"]["largest_relative_difference"] <= 1e-5


def refusal(*args) -> str:
    """Run with bad input: exit code 2, one sentence on stderr, nothing else anywhere."""
    result = run_demo(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.rstrip().endswith(".")
    return result.stderr


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--chunk", 100, "--page", 16], "--chunk must be a multiple of --page, got 100 and 16"),
        (["--context", 1], "--context must be at least 2, got 1"),
        (["--context", -5], "--context must be at least 2, got -5"),
        (["--chunk", 0], "--chunk must be at least 1, got 0"),
        (["--page", -128], "--page must be at least 1, got -128"),
        (["--steps", 0], "--steps must be at least 1, got 0"),
        (["--lr", "nan"], "--lr must be a positive number, got nan"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda, got 'tpu'"),
        (["--text", "no/such.txt"], "--text no/such.txt cannot be read: No such file"),
        (["--model", "no/such"], "--model must be a transformers folder, no/such does not exist"),
        (["--json", "no/such/a.json"], "--json no/such/a.json cannot be written: there is no fold"),
        (["--out", "no/such/a.oomb"], "--out no/such/a.oomb cannot be written: there is no folder"),
        (["--json", "a", "--out", "a"], "--json and --out must be two files, both are a"),
        (["--context", 10_000_000], "--context 10000000 is more than the 131072 positions"),
        (["--context", 100_000], "tokens, --context 100000 needs at least 100000"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_bad_options_are_refused(args, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in refusal(*args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    assert "PyTorch sees none here" in refusal("--device", "cuda")


def test_bad_text_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"caf\xe9 " * 1000)
    assert "is not UTF-8 (byte 3 is 0xe9)" in refusal("--text", path)
    path.write_text(" \n")
    assert "is empty" in refusal("--text", path)
    path.write_text("In the beginning " * 30)
    message = refusal("--text", path, "--context", 1000)
    assert "has " in message and " tokens, --context 1000 needs at least 1142" in message
    assert "Is a directory" in refusal("--text", tmp_path)


def test_the_shortest_text_that_is_enough_is_enough(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    ids = tokenizer(demo_text("heldout")[:3000])["input_ids"]
    path = tmp_path / "text.txt"
    for count in (len(ids) - 1, len(ids)):
        path.write_text(tokenizer.decode(ids[:count]))
        count = len(tokenizer(path.read_text())["input_ids"])
        context = count - count // 8
        inputs = demo_inputs(text=path, context=context)
        assert len(inputs.train) == context
        assert f"{count} tokens" in refusal(
            "--text", path, "--context", context + 1, "--out", tmp_path / "a.oomb"
        )


def test_bad_model_folders_are_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no config.json" in refusal("--model", empty)
    no_tokenizer = tmp_path / "no_tokenizer"
    no_tokenizer.mkdir()
    shutil.copy(demo_model_dir() / "config.json", no_tokenizer)
    assert "has no tokenizer" in refusal("--model", no_tokenizer)
    no_weights = tmp_path / "no_weights"
    shutil.copytree(demo_model_dir(), no_weights)
    (no_weights / "model.safetensors").unlink()
    assert "cannot be loaded" in refusal("--model", no_weights)
    (no_weights / "config.json").write_text("{")
    assert "config.json cannot be used" in refusal("--model", no_weights)
    a_file = tmp_path / "file"
    a_file.write_text("x")
    assert "is a file" in refusal("--model", a_file)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(demo_model_dir(), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(300)
    model.save_pretrained(folder)
    assert "they do not belong together" in refusal("--model", folder)


def test_a_model_the_engine_refuses_is_refused_before_any_work(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(demo_model_dir(), folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    result = run_demo(*SMALL, "--model", folder, "--out", tmp_path / "a.oomb")
    assert result.exit_code == 2, result.output
    assert "dynamic" in result.stderr
    assert not (tmp_path / "a.oomb").exists()
