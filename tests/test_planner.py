"""The plan is what was measured, and what the engine takes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import tiny_model
from transformers import AutoConfig, GPT2Config, LlamaConfig, Qwen2Config
from typer.testing import CliRunner

import oomb
from oomb.bench.models import QWEN2_7B
from oomb.chunking import plan_chunks
from oomb.cli import app
from oomb.planner import (
    GIB,
    Card,
    Machine,
    ModelSizes,
    changes,
    longest_context,
    page_budget,
    plan_step,
    refuse_what_cannot_fit,
)
from oomb_assets import demo_model_dir

RESULTS = Path(__file__).parent.parent / "assets" / "results"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STEPS = sorted(RESULTS.glob("step_*h200.json"))
H200 = Machine("H200", round(139.8 * GIB), 128 * GIB)


@pytest.fixture(scope="module")
def seven_billion():
    return ModelSizes.of(Qwen2Config(**QWEN2_7B), torch.bfloat16)


def measured():
    for path in STEPS:
        report = json.loads(path.read_text())
        for row in report["rows"]:
            yield report["settings"], row["tokens"], row["oomb"]["peak_gib"]


def test_the_peaks_are_those_measured_on_an_h200(seven_billion):
    found = list(measured())
    assert len(found) >= 7
    for settings, tokens, peak in found:
        config = oomb.EngineConfig(
            chunk_size=settings["chunk"],
            page_size=settings["page"],
            activation_policy=settings["policy"],
            grad_dtype=DTYPES[settings["grad_dtype"]],
            page_grad_dtype=DTYPES[settings["page_grad_dtype"]],
            page_grad_rounding=settings.get("page_grad_rounding", "nearest"),
            keep_fill_outputs=settings["keep_fill_outputs"],
            live_chunks=settings.get("live_chunks", 1),
        )
        planned = plan_step(seven_billion, config, tokens).gpu_peak / GIB
        assert planned == pytest.approx(peak, rel=0.01), (settings, tokens)


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_are_the_models(tied):
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied,
    )  # fmt: skip
    sizes = ModelSizes.of(config, torch.float32)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert sizes.trained == sum(p.numel() for p in model.parameters())
    assert sizes.layers[0].heads == 2 and sizes.layers[0].dim == 16 and len(sizes.layers) == 3
    # Input, residual and both normed; attention's output; q, k, v, gate, up; the gated product.
    assert sizes.saved == 4 * 32 + 64 + (64 + 32 + 32 + 48 + 48) + 48


def test_other_families_have_sizes():
    sizes = ModelSizes.of(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97), torch.float32)
    assert sizes.layers[0].heads == 4 and sizes.layers[0].dim == 8
    assert sizes.saved >= 4 * 32


LOW = {"page_dtype": "fp8", "page_grad_dtype": torch.bfloat16}


@pytest.mark.parametrize("low", [{}, LOW], ids=["", "low precision"])
@pytest.mark.parametrize("budget", [0, 20_000, 10**9])
@pytest.mark.parametrize("outputs", [False, True])
def test_pages_are_what_the_engine_takes(budget, outputs, low):
    """To the byte, on both tiers."""
    model = tiny_model("llama", torch.float32)
    config = oomb.EngineConfig(
        chunk_size=12,
        page_size=4,
        segment_pages=2,
        keep_fill_outputs=outputs,
        offload=oomb.OffloadConfig(gpu_budget=budget),
        **low,
    )
    plan = plan_step(ModelSizes.of(model.config, torch.float32), config, 60)
    with oomb.Engine(model, config) as engine:
        steps = engine.iter_step(torch.zeros(1, 60, dtype=torch.int64))
        states = [next(steps) for _ in range(5)]
        assert engine.host_memory == plan.host_total
        steps.close()
    alive = states[-2].bytes_alive  # the fill has ended
    assert alive["kv_pages"] == plan.gpu["K/V pages"]
    assert alive.get("host_kv_pages", 0) == plan.host["K/V pages"]
    assert alive.get("host_fill_outputs", 0) == plan.host["fill outputs"]
    assert (plan.host["fill outputs"] > 0) == outputs


@pytest.mark.parametrize("offload", [None, oomb.OffloadConfig()], ids=["", "offload"])
def test_low_precision_is_counted_with_scales_and_scratch(seven_billion, offload):
    """A page of 128 tokens, 4 heads of 128 numbers: 2 scales of 4 bytes per head, for K and V."""
    context = 9 * 4096  # 8 chunks in pages, which are one segment
    config = oomb.EngineConfig(offload=offload, segment_pages=256)
    low = plan_step(seven_billion, replace(config, **LOW), context)
    high = plan_step(seven_billion, config, context)
    where = "gpu" if offload is None else "host"
    pages = 28 * 8 * 32
    keys, gradients = (getattr(low, where)[name] for name in ("K/V pages", "page gradients"))
    assert keys == pages * 2 * (128 * 4 * 128 + 2 * 4 * 4)
    assert gradients == getattr(high, where)["page gradients"] // 2
    assert low.gpu["segments in full precision"] == 2 * 32768 * 4 * 128 * (2 + 4)
    assert high.gpu["segments in full precision"] == 0
    if offload is not None:
        per_segment = keys // 28
        assert low.gpu["segment ring"] == (3 + 2) * per_segment + 3 * gradients // 28


@pytest.mark.parametrize("offload", [None, oomb.OffloadConfig()])
def test_the_longest_context_is_the_last_that_fits(seven_billion, offload):
    config = oomb.EngineConfig(offload=offload)
    longest = longest_context(seven_billion, config, H200)
    assert longest % 4096 == 0
    assert plan_step(seven_billion, config, longest).fits(H200)
    assert not plan_step(seven_billion, config, longest + 4096).fits(H200)
    tiny = Machine("tiny", GIB, GIB)
    assert longest_context(seven_billion, config, tiny) == 0


def test_changes_fit(seven_billion):
    config = oomb.EngineConfig(activation_policy="keep", live_chunks=2)
    machine = Machine("80 GiB", 80 * GIB, 256 * GIB)
    assert not plan_step(seven_billion, config, 131072).fits(machine)
    found = changes(seven_billion, config, 131072, machine)
    assert found and all(plan.fits(machine) for _, plan in found)
    names = [name for name, _ in found]
    assert "activation_policy='selective'" in names and "live_chunks=1" not in names


def test_memory_on_the_gpu_does_not_grow_with_offload(seven_billion):
    config = oomb.EngineConfig(offload=oomb.OffloadConfig())
    peaks = {plan_step(seven_billion, config, n << 10).gpu_peak for n in (128, 256, 512, 1024)}
    assert len(peaks) == 1


def full_row(context):
    """Pages of one row of one document, in chunks of 4096 and pages of 128."""
    return plan_chunks([context], [[0]], chunk_size=4096, page_size=128).pages_per_row


@pytest.mark.parametrize("context", [65536, 262144, 1 << 20])
def test_auto_fills_what_is_left(seven_billion, context):
    """The step then takes nearly all of the card, or all of its pages are there."""
    card = Card("H200", H200.gpu, 5 * GIB)
    config = oomb.EngineConfig(offload=oomb.OffloadConfig(gpu_budget="auto"))
    budget = page_budget(seven_billion, config, context, full_row(context), card)
    filled = replace(config, offload=oomb.OffloadConfig(gpu_budget=budget))
    plan = plan_step(seven_billion, filled, context)
    room = 0.97 * card.total - card.taken
    assert plan.gpu_peak <= room
    slot = 32768 * 57344 * 3
    assert plan.gpu_peak > room - slot or not plan.host_total
    refuse_what_cannot_fit(seven_billion, filled, context, full_row(context), card)
    full = Card("H200", H200.gpu, 100 * GIB)
    assert page_budget(seven_billion, config, context, full_row(context), full) == 0


def test_what_cannot_fit_is_refused_with_numbers(seven_billion):
    card = Card("H200", H200.gpu, GIB)
    with pytest.raises(
        ValueError,
        match=r"1 x 1,048,576 tokens needs 211.* GiB of GPU.*"
        r"\(weights 14.2, weight gradients 28.4, K/V pages 56.0, page gradients "
        r"112.0, other tensors and programs 1.0\), but H200 has 139.8; use "
        r"offload=oomb.OffloadConfig\(\), which puts 168.0 GiB on the host",
    ):
        refuse_what_cannot_fit(seven_billion, oomb.EngineConfig(), 1 << 20, full_row(1 << 20), card)
    refuse_what_cannot_fit(seven_billion, oomb.EngineConfig(), 1 << 18, full_row(1 << 18), card)
    with pytest.raises(ValueError, match="see `oomb plan`"):
        full = Card("small", 20 * GIB, 0)
        refuse_what_cannot_fit(seven_billion, oomb.EngineConfig(), 1 << 18, full_row(1 << 18), full)


def test_packed_rows_need_fewer_pages(seven_billion):
    """Documents of 3,000 tokens: only what crosses a chunk's border is in pages."""
    context = 1 << 20
    documents = [list(range(0, context, 3000))]
    plan = plan_chunks([context], documents, chunk_size=4096, page_size=128)
    config, card = oomb.EngineConfig(), Card("H200", H200.gpu, 0)
    refuse_what_cannot_fit(seven_billion, config, context, plan.pages_per_row, card)
    packed = plan_step(seven_billion, config, context, pages_per_row=plan.pages_per_row)
    assert packed.gpu["K/V pages"] < plan_step(seven_billion, config, context).gpu["K/V pages"] / 2


def test_gradients_are_as_wide_as_the_engine_makes_them(seven_billion):
    halves = oomb.EngineConfig(grad_dtype=torch.float16)
    assert plan_step(seven_billion, halves, 8192).gpu["weight gradients"] == 4 * 7615616512
    twice = oomb.EngineConfig(restore_grads=True)
    assert plan_step(seven_billion, twice, 8192).gpu["weight gradients"] == 8 * 7615616512


def test_auto_on_a_cpu_keeps_nothing():
    model = tiny_model("llama", torch.float32)
    config = oomb.EngineConfig(
        chunk_size=12, page_size=4, offload=oomb.OffloadConfig(gpu_budget="auto")
    )
    with oomb.Engine(model, config) as engine:
        steps = engine.iter_step(torch.zeros(1, 60, dtype=torch.int64))
        assert next(steps).bytes_alive["kv_pages"] == 0
        steps.close()


def invoke(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def test_the_command_prints_and_says_what_to_change():
    result = invoke("--gpu", 80, "--host", 300, "--context", 262144, "--policy", "keep")
    assert result.exit_code == 1, result.output
    assert "does not fit into 97% of the GPU's 80.0 GiB" in result.output
    assert "it fits with offload=oomb.OffloadConfig()" in result.output
    result = invoke("--gpu", 80, "--host", 300, "--context", 262144, "--offload", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)
    assert plan["fits"] and plan["gpu_peak"] == sum(plan["gpu"].values())
    assert plan["longest_context"] >= 262144 and plan["host_total"] == sum(plan["host"].values())


def test_the_command_takes_low_precision():
    words = ("--gpu", 80, "--host", 300, "--offload", "--json")
    low = ("--page-dtype", "fp8", "--page-grad-dtype", "bf16")
    plans = [json.loads(invoke(*words, *more).output) for more in ((), low)]
    assert plans[1]["host_total"] < 0.51 * plans[0]["host_total"]
    assert plans[1]["longest_context"] > 1.9 * plans[0]["longest_context"]
    nearest = invoke(*words, *low, "--page-grad-rounding", "nearest")
    scratch = "segments in full precision"
    assert 0 < json.loads(nearest.output)["gpu"][scratch] < plans[1]["gpu"][scratch]


def test_the_command_reads_a_folder():
    result = invoke(demo_model_dir(), "--gpu", 2, "--context", 16384, "--json")
    assert result.exit_code == 0, result.output
    config = AutoConfig.from_pretrained(demo_model_dir())
    sizes = ModelSizes.of(config, torch.bfloat16)
    assert json.loads(result.output)["gpu"]["weights"] == sizes.weights


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere", "--gpu", 80), "must be qwen2-7b or a folder with a config.json"),
        (("--gpu", 0), "--gpu must be more than 0 GiB and at most 1000000, got 0.0"),
        (("--gpu", "nan"), "--gpu must be more than 0 GiB and at most 1000000, got nan"),
        (("--gpu", "inf"), "--gpu must be more than 0 GiB and at most 1000000, got inf"),
        (("--gpu", 80, "--offload", "--gpu-budget", "inf"), "--gpu-budget must be at most"),
        (("--gpu", 80, "--offload", "--gpu-budget", 0.1), "gpu_budget must hold the ring's 3"),
        (("--gpu", 80, "--chunk", 100), "chunk_size must be a multiple of page_size"),
        (("--gpu", 80, "--optimizer", "lion"), "--optimizer must be one of none, sgd"),
        (("--gpu", 80, "--dtype", "int8"), "--dtype must be one of bf16"),
        (("--gpu", 80, "--gpu-budget", 3), "add --offload"),
        (("--gpu", 80, "--context", 0), "--context must be at least 1"),
        (("--gpu", 80, "--page-dtype", "fp4"), "--page-dtype must be one of model, fp8"),
        (("--gpu", 80, "--page-grad-rounding", "up"), "--page-grad-rounding must be one of stoch"),
    ],
)
def test_bad_input_is_refused(words, said):
    result = invoke(*words)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    "config",
    ['{"model_type": "t5"}', '{"model_type": "mamba"}', '{"model_type": "nothing"}', "[]", "{"],
)
def test_a_folder_without_a_causal_model_is_refused(config, tmp_path):
    (tmp_path / "config.json").write_text(config)
    result = invoke(tmp_path, "--gpu", 80)
    assert result.exit_code == 2, result.output
    assert "cannot be read" in result.output or "can be sized" in result.output


def test_the_longest_context_is_never_below_one_that_fits():
    result = invoke(demo_model_dir(), "--gpu", 80, "--context", 3000, "--json")
    assert json.loads(result.output)["longest_context"] >= 3000
    small = ("--chunk", 128, "--context", 4_000_000, "--json")
    plan = json.loads(invoke(demo_model_dir(), "--gpu", 800, *small).output)
    assert plan["fits"] and plan["longest_context"] > 4_000_000


def test_a_budget_too_small_for_longer_contexts_still_plans_this_one():
    words = ("--gpu", 80, "--host", 2000, "--offload", "--gpu-budget", 0.7, "--context", 4096)
    result = invoke(*words)
    assert result.exit_code == 0, result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_memory_must_be_said():
    result = invoke()
    assert result.exit_code == 2
    assert "say how much memory it has, such as --gpu 80" in " ".join(result.output.split())
