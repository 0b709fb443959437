"""The benchmarks: what they time is right, what they count is right, and bad input is refused."""

import json
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from oomb.attention import choose_backend
from oomb.bench.attention import measure
from oomb.bench.attention.measure import measure_shape
from oomb.bench.attention.options import AttentionOptions, Shape, check
from oomb.bench.attention.ours import Ours
from oomb.bench.attention.peers import CannotRunError, _reason, make_peer
from oomb.bench.attention.problem import make_problem
from oomb.bench.attention.run import failed
from oomb.bench.attention.truth import compared_heads, exact_head, relative_errors
from oomb.bench.inputs import InputError, one_sentence
from oomb.bench.machine import machine_facts
from oomb.bench.models import SHAPES, TINY, make_model
from oomb.bench.step import child
from oomb.bench.step import run as step_run
from oomb.bench.step.flops import LayerSizes, checkpointed, chunked, pairs, useful
from oomb.bench.step.measure import clear, measure_length
from oomb.bench.step.options import StepOptions
from oomb.bench.step.options import check as check_step
from oomb.bench.step.roofline import Rates, least_seconds, rates_of
from oomb.bench.step.sample import sample_length, total
from oomb.bench.step.sides import OurSide, TheirSide
from oomb.bench.step.split import class_of_kernel, split_of_trace
from oomb.bench.table import step_table
from oomb.bench.timing import timed
from oomb.cli import app

CPU = torch.device("cpu")
SMALL = {"queries": 24, "keys": "40", "square": "24", "heads": 4, "kv_heads": 2, "head_dim": 16}
SMALL |= {"page": 8, "rounds": 1, "device": "cpu"}


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr(measure, "ROUND_SECONDS", 0.001)


def invoke(*words):
    return CliRunner().invoke(app, ["bench", *map(str, words)], env={"COLUMNS": "100"})


def flags(options):
    return [
        word for name, value in options.items() for word in ("--" + name.replace("_", "-"), value)
    ]


# -- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [Shape(7, 11, False, 4, 2, 8), Shape(9, 9, True, 4, 2, 8)])
def test_blockwise_truth_is_attention(shape, monkeypatch):
    monkeypatch.setattr("oomb.bench.attention.truth.QUERY_BLOCK", 4)
    monkeypatch.setattr("oomb.bench.attention.truth.KEY_BLOCK", 3)
    problem = make_problem(shape, CPU, torch.float64)
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    wide_k, wide_v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = q @ wide_k.mT * problem.scale
    if shape.causal:
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    out = scores.softmax(-1) @ wide_v
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), problem.grad_out)
    for head in range(2):
        exact = exact_head(problem, head)
        group = slice(2 * head, 2 * head + 2)
        expected = {"out": out[0, group], "dq": dq[0, group], "dk": dk[0, head], "dv": dv[0, head]}
        for field, value in expected.items():
            torch.testing.assert_close(exact[field], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["library", "reference"])
@pytest.mark.parametrize("segment", [None, 16])
@pytest.mark.parametrize("number", [0, 1])
def test_ours_is_exact_through_pages_and_segments(backend, segment, number):
    settings = check(AttentionOptions(**SMALL, dtype="fp64", segment=segment))
    problem = make_problem(settings.shapes[number], CPU, torch.float64)
    chosen = choose_backend(backend, device=CPU, dtype=torch.float64, head_dims={16})
    ours = Ours("ours", problem, chosen, settings)
    ours.backward(ours.forward())  # an earlier run leaves nothing in the page gradients
    errors = relative_errors(problem, {"ours": ours.outcome()})["ours"]
    assert max(errors.values()) < 1e-12


@pytest.mark.parametrize("number", [0, 1])
def test_a_peer_is_exact_with_its_keys_copied_or_shared(number):
    settings = check(AttentionOptions(**SMALL, dtype="fp64"))
    problem = make_problem(settings.shapes[number], CPU, torch.float64)
    peer = make_peer("SDPA FA2", problem)
    copied = type(peer)("copied", problem, peer._attention, expanded=True)
    assert copied.note == "K and V copied to 4 heads, and gradients summed, untimed"
    errors = relative_errors(problem, {"peer": peer.outcome(), "copied": copied.outcome()})
    assert max(max(each.values()) for each in errors.values()) < 1e-12


def test_an_error_is_noticed():
    problem = make_problem(Shape(8, 8, True, 2, 1, 8), CPU, torch.float64)
    outcome = make_peer("SDPA FA2", problem).outcome()
    outcome.dk[:, :, 3] *= 1.01
    errors = relative_errors(problem, {"wrong": outcome})["wrong"]
    assert errors["dk"] > 1e-4
    assert errors["dv"] < 1e-12


def test_of_large_problems_only_some_heads_are_compared():
    assert compared_heads(Shape(4096, 8192, False, 28, 4, 128), torch.device("cuda")) == [
        0,
        1,
        2,
        3,
    ]
    assert compared_heads(Shape(4096, 1 << 20, False, 28, 4, 128), torch.device("cuda")) == [0]
    assert compared_heads(Shape(4096, 1 << 19, False, 28, 4, 128), torch.device("cuda")) == [
        0,
        1,
        2,
    ]


def test_flops_of_attention():
    rectangle = Shape(10, 20, False, 3, 1, 4)
    assert (rectangle.forward_flops, rectangle.backward_flops) == (9600, 24000)
    assert Shape(10, 10, True, 3, 1, 4).forward_flops == 2400


@pytest.mark.parametrize("name", ["SDPA cuDNN", "FlexAttention"])
def test_peers_that_cannot_run_say_why_in_one_sentence(name):
    problem = make_problem(Shape(8, 8, True, 2, 1, 8), CPU, torch.float32)
    with pytest.raises(CannotRunError, match=r"needs a CUDA GPU\.$"):
        make_peer(name, problem)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("No kernel. Aborting.\nTrace", "No kernel."),
        (
            "backend='inductor' raised:\nRuntimeError: no compiler",
            "backend='inductor' raised: RuntimeError: no compiler.",
        ),
        ("", "ValueError."),
        ("x" * 300, "x" * 197 + "...."),
    ],
)
def test_reasons_are_one_sentence(message, sentence):
    assert one_sentence(ValueError(message)) == sentence


def test_a_kernels_own_warning_is_the_reason():
    told = [
        "Memory efficient kernel not used because: (Triggered internally at a.cpp:1.)",
        "Something else. (Triggered internally at a.cpp:2.)",
        "CuDNN attention kernel not used because: (Triggered internally at a.cpp:3.)",
        "cuDNN SDPA does not take head_dim 4. (Triggered internally at a.cpp:4.)",
    ]
    error = RuntimeError("No available kernel. Aborting execution.")
    assert _reason("SDPA cuDNN", error, told) == "cuDNN SDPA does not take head_dim 4."
    assert _reason("SDPA FA2", error, told) == "No available kernel."


def test_a_backend_that_raises_is_listed_and_the_others_are_measured(monkeypatch):
    def broken(name, **facts):
        if name == "library":
            raise RuntimeError("the kernel is broken.\nA long trace follows")
        return choose_backend(name, **facts)

    monkeypatch.setattr(measure, "choose_backend", broken)
    settings = check(AttentionOptions(**SMALL, backends="library,reference", peers=False))
    row = measure_shape(settings.shapes[0], settings)
    assert [each["name"] for each in row["implementations"]] == ["oomb reference"]
    reason = "RuntimeError: the kernel is broken."
    assert row["left_out"] == [{"name": "oomb library", "reason": reason, "failed": True}]
    assert failed({"rows": [row]})


def test_bench_attention_prints_and_writes(tmp_path, monkeypatch):
    path = tmp_path / "attention.json"
    words = ["attention", *flags(SMALL), "--out", path]
    monkeypatch.setattr(sys, "argv", ["oomb", "bench", *map(str, words)])
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert "oomb library" in result.stdout and "SDPA cuDNN left out: it needs" in result.stdout
    assert "Traceback" not in result.output
    report = json.loads(path.read_text())
    assert report["command"].startswith("oomb bench attention --queries 24")
    assert str(path) not in report["command"]
    assert set(machine_facts(CPU)) <= set(report)
    assert [(row["keys"], row["causal"]) for row in report["rows"]] == [(40, False), (24, True)]
    for row in report["rows"]:
        by_name = {each["name"]: each for each in row["implementations"]}
        assert set(by_name) == {"oomb library", "oomb reference", "SDPA FA2"}
        for each in by_name.values():
            assert 0 < max(each["error"].values()) < 0.01
            flops = 4 * 4 * 16 * row["queries"] * row["keys"] / (2 if row["causal"] else 1)
            rate = flops / (each["forward_ms"] / 1e3) / 1e12
            assert each["forward_tflops"] == pytest.approx(rate)
            rate = 2.5 * flops / (each["backward_ms"] / 1e3) / 1e12
            assert each["backward_tflops"] == pytest.approx(rate)
            assert len(each["forward_ms_of_rounds"]) == 1
        ratio = by_name["SDPA FA2"]["forward_ms"] / by_name["oomb library"]["forward_ms"]
        assert by_name["oomb library"]["times_fa2"]["forward"] == pytest.approx(ratio)
        assert by_name["oomb library"]["times_cudnn"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--queries", 0], "--queries must be at least 1, got 0"),
        (["--keys", "8,x"], "--keys must be whole numbers between commas"),
        (["--keys", "8,0"], "--keys must be at least 1, got 0"),
        (["--keys", "none", "--square", "none"], "nothing to measure"),
        (["--heads", 6, "--kv-heads", 4], "use --heads 4 or 8"),
        (["--segment", 100], "--segment must be a multiple of --page, got 100 and 128"),
        (
            ["--backends", "library,fast"],
            "one of library, triton, reference, triton-atomic, got 'fast'",
        ),
        (["--dtype", "int8"], "--dtype must be one of bf16, fp16, fp32, fp64, got 'int8'"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda, got 'tpu'"),
        (["--out", "/nowhere/a.json"], "there is no folder /nowhere"),
    ],
)
def test_bench_attention_refuses(words, said):
    result = invoke("attention", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


# -- step: FLOPs ----------------------------------------------------------------------------------

SIZES = LayerSizes(layers=2, hidden=8, intermediate=10, heads=2, kv_heads=1, head_dim=4, vocab=5)
# Per layer: q and o 8 x 8, k and v 8 x 4, gate, up and down 8 x 10.
LINEAR, DOWN = 64 + 64 + 32 + 32 + 240, 80


def test_sizes():
    assert (SIZES.linear, SIZES.down, SIZES.per_pair) == (LINEAR, DOWN, 4 * 2 * 4 * 2)
    assert (pairs(3), pairs(3, 10)) == (6, 36)


def test_sizes_are_the_models():
    model = make_model(TINY, 2, device=CPU, dtype=torch.float32)
    layers = model.model.layers
    weights = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    assert 2 * check_step(StepOptions(shape="tiny", device="cpu")).sizes().linear == weights


def test_useful_flops():
    flops = useful(SIZES, 6)
    assert flops.linear == 3 * 2 * 2 * LINEAR * 6
    assert flops.attention_forward == 64 * 21
    assert flops.attention_backward == 2 * 64 * 21
    assert flops.loss == 3 * 2 * 5 * 8 * 6
    assert flops.total == flops.linear + 3 * 64 * 21 + flops.loss


def test_flops_of_checkpointing():
    flops = checkpointed(SIZES, 6)
    assert flops.linear == 2 * 2 * 6 * (4 * LINEAR - DOWN)
    assert flops.attention_forward == 2 * 64 * 21
    assert flops.attention_backward == 2.5 * 64 * 21


@pytest.mark.parametrize(
    ("policy", "keep", "linear", "attention"),
    [
        # Chunks of 4 and 2: pairs 10 and 11; the second has no fill.
        ("keep", False, 4 * 4 * LINEAR + 2 * 3 * LINEAR, 2 * 10 + 11),
        ("selective", False, 4 * (5 * LINEAR - DOWN) + 2 * (4 * LINEAR - DOWN), 2 * 10 + 11),
        ("layer", False, 4 * (5 * LINEAR - DOWN) + 2 * (4 * LINEAR - DOWN), 3 * 10 + 2 * 11),
        ("selective", True, 4 * (5 * LINEAR - DOWN) + 2 * (4 * LINEAR - DOWN), 10 + 11),
        ("layer", True, 4 * (5 * LINEAR - DOWN) + 2 * (4 * LINEAR - DOWN), 10 + 2 * 11),
    ],
)
def test_flops_of_chunk_recurrence(policy, keep, linear, attention):
    flops = chunked(SIZES, 6, chunk=4, policy=policy, live_chunks=1, keep_fill_outputs=keep)
    assert flops.linear == 2 * 2 * linear
    assert flops.attention_forward == 64 * attention
    assert flops.attention_backward == 2.5 * 64 * 21
    assert flops.loss == useful(SIZES, 6).loss


def test_flops_of_the_fills_last_layer():
    """Three chunks of 4, 4 and 2: the second's last layer ends with its keys and values."""
    settings = {"chunk": 4, "policy": "keep"}
    two = chunked(SIZES, 10, **settings, live_chunks=1, keep_fill_outputs=False)
    behind = 2 * 4 * SIZES.behind_attention
    assert two.linear == 2 * 2 * (8 * 4 + 2 * 3) * LINEAR - behind
    second = 4 * 4 + 10
    assert two.attention_forward == 64 * (2 * 10 + 2 * second + 2 * 8 + 3) - 32 * second
    kept = chunked(SIZES, 10, **settings, live_chunks=1, keep_fill_outputs=True)
    assert kept.linear == two.linear
    assert kept.attention_forward == 64 * (10 + second + 2 * 8 + 3)
    live = chunked(SIZES, 10, **settings, live_chunks=2, keep_fill_outputs=False)
    assert live.linear == 2 * 2 * (4 * 4 + 6 * 3) * LINEAR
    assert live.attention_forward == 64 * (2 * 10 + second + 2 * 8 + 3)


@pytest.mark.parametrize(
    ("side", "changes"),
    [
        (TheirSide, {}),
        (OurSide, {"policy": "keep"}),
        (OurSide, {"policy": "keep", "live_chunks": 2}),
        (OurSide, {"policy": "selective"}),
        (OurSide, {"policy": "layer", "keep_fill_outputs": True}),
    ],
)
def test_products_that_run_are_those_that_are_counted(side, changes):
    options = {"shape": "tiny", "chunk": 16, "page": 8, "device": "cpu", **changes}
    settings = check_step(StepOptions(**options))
    runner = side(settings)
    ids = torch.randint(0, 512, (1, 40))
    runner.run(ids)
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **keywords: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        runner.run(ids)
    counts = counter.get_flop_counts()["Global"]
    aten = torch.ops.aten
    products = sum(counts.get(op, 0) for op in (aten.mm, aten.addmm, aten.addmm_))
    computed = runner.computed(40)
    assert products == computed.linear + computed.loss


def test_low_precision_reaches_the_engine_and_the_table(tmp_path):
    low = {"page_dtype": "fp8", "page_grad_dtype": "bf16"}
    for more, said in (
        ({}, "fp8 pages, bf16 page gradients |"),
        ({"page_grad_rounding": "nearest"}, "gradients, `page_grad_rounding='nearest'` |"),
    ):
        settings = check_step(StepOptions(shape="tiny", device="cpu", **low, **more))
        config = settings.engine_config()
        assert config.page_dtype == "fp8" and config.page_grad_dtype == torch.bfloat16
        assert config.page_grad_rounding == more.get("page_grad_rounding", "stochastic")
        run = {"tokens_per_s": 1.0, "peak_gib": 1.0}
        report = {
            "settings": settings.plain(),
            "rows": [{"tokens": 8, "oomb": run, "transformers": run}],
        }
        (tmp_path / "report.json").write_text(json.dumps(report))
        assert step_table([tmp_path / "report.json"]).endswith(said)
    with pytest.raises(InputError, match="--page-dtype must be one of model, fp8, got 'fp6'"):
        check_step(StepOptions(shape="tiny", device="cpu", page_dtype="fp6"))


def test_the_roofline_of_a_step():
    flops = useful(SIZES, 6)
    rates = Rates(linear=2, attention_forward=3, attention_backward=4, peak=5, source="")
    expected = (flops.linear + flops.loss) / 2e12
    expected += flops.attention_forward / 3e12 + flops.attention_backward / 4e12
    assert least_seconds(flops, rates) == pytest.approx(expected)


def test_an_unknown_device_is_measured(monkeypatch):
    monkeypatch.setattr("oomb.bench.step.roofline.GEMM_SECONDS", 0.001)
    rates = rates_of(CPU, torch.float32)
    assert rates.linear == rates.peak > 0
    assert "measured here" in rates.source


# -- step: split ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", "linear"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64>", "linear"),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
            "linear",
        ),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "linear"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_6_64x128x128",
            "attention",
        ),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("attend_kernel", "attention"),
        ("liger_cross_entropy_kernel", "loss"),
        ("_rms_norm_forward_kernel", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kernel_names(name, kind):
    assert class_of_kernel(name) == kind


def span(cat, name, ts, dur, tid=1, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_kernels_belong_to_what_launched_them():
    trace = [
        {"ph": "M", "name": "process_name"},
        span("user_annotation", "oomb::attention", 0, 10),
        span("cpu_op", "aten::_scaled_dot_product_cudnn_attention", 2, 5),
        span("user_annotation", "oomb::loss", 20, 10),
        span("user_annotation", "oomb::projection", 0, 100),
        span("gpu_user_annotation", "oomb::attention", 100, 1000, tid=7),
        span("cuda_runtime", "cudaLaunchKernel", 9, 1, correlation=1),
        span("cuda_driver", "cuLaunchKernel", 25, 1, correlation=2),
        span("cuda_runtime", "cudaLaunchKernel", 5, 1, tid=2, correlation=3),  # another thread
        span("cuda_runtime", "cudaMemcpyAsync", 40, 1, correlation=4),
        span("kernel", "elementwise_kernel", 100, 20, tid=7, correlation=1),
        span("kernel", "nvjet_hsh_128x256", 130, 30, tid=7, correlation=2),
        span("kernel", "elementwise_kernel", 150, 20, tid=8, correlation=3),
        span("gpu_memcpy", "Memcpy HtoD", 180, 5, tid=7, correlation=4),
        span("kernel", "sm90_xmma_gemm", 185, 15, tid=7, correlation=99),  # launch not recorded
    ]
    split = split_of_trace(trace)
    times = {name: round(1e6 * seconds) for name, seconds in split["seconds"].items()}
    # Busy 100-120, 130-170 (two streams at once), 180-200.
    assert times == {"linear": 15, "attention": 20, "loss": 30, "other": 25, "idle": 20}
    assert split["span"] == pytest.approx(100e-6)
    assert split["kernels"] == 5
    assert split["top"][0] == ("loss", "nvjet_hsh_128x256", pytest.approx(30e-6), 1)


def test_a_real_trace_holds_stages_where_they_are_looked_for(tmp_path):
    from oomb.bench.step.split import _Ranges

    settings = check_step(StepOptions(shape="tiny", lengths="32", chunk=16, device="cpu"))
    side = OurSide(settings)
    with torch.profiler.profile() as profiler:
        side.run(torch.arange(32)[None])
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    ranges = _Ranges(events)
    inside = [e for e in events if "flash_attention_for_cpu" in e["name"]]
    assert any("backward" in e["name"] for e in inside)
    assert {ranges.of(event) for event in inside} == {"attention"}
    names = {"aten::_log_softmax", "aten::_log_softmax_backward_data"}
    assert {ranges.of(event) for event in events if event["name"] in names} == {"loss"}


# -- step: runs -----------------------------------------------------------------------------------

TINY_RUN = ["step", "--shape", "tiny", "--lengths", "48", "--seconds", 0, "--no-warmup"]
TINY_RUN += ["--layers", 1, "--chunk", 16, "--page", 8, "--device", "cpu"]


@pytest.fixture
def in_this_process(monkeypatch):
    """Run the sides here: starting Python twice takes longer than everything else."""

    class Done:
        returncode = 0

    def run(command, **_):
        child.main(command[-3:])
        return Done

    monkeypatch.setattr(step_run.subprocess, "run", run)
    monkeypatch.setattr("oomb.bench.step.roofline.GEMM_SECONDS", 0.001)


def test_bench_step_prints_and_writes(tmp_path, in_this_process):
    path = tmp_path / "step.json"
    result = invoke(*TINY_RUN, "--policy", "layer", "--keep-fill-outputs", "--out", path)
    assert result.exit_code == 0, result.output
    assert "liger not used: it needs a GPU" in result.stdout
    report = json.loads(path.read_text())
    assert report["settings"]["policy"] == "layer" and report["settings"]["keep_fill_outputs"]
    assert report["sides"]["oomb"]["attention"] == "library"
    (row,) = report["rows"]
    assert row["agrees"] is True and max(row["apart"].values()) < 1e-5
    ours, theirs = row["oomb"], row["transformers"]
    assert row["speed_ratio"] == pytest.approx(ours["tokens_per_s"] / theirs["tokens_per_s"])
    for side in (ours, theirs):
        assert side["tokens_per_s"] == pytest.approx(48 / side["step_seconds"][0])
        assert 0 < side["utilisation"] < side["share_of_roofline"]
        assert side["peak_gib"] is None
    sizes = check_step(StepOptions(shape="tiny", layers=1, device="cpu")).sizes()
    expected = chunked(sizes, 48, chunk=16, policy="layer", live_chunks=1, keep_fill_outputs=True)
    assert ours["computed_flops"]["linear"] == expected.linear
    assert theirs["computed_flops"]["linear"] == checkpointed(sizes, 48).linear


def test_bench_step_offloads(tmp_path, in_this_process):
    path = tmp_path / "step.json"
    result = invoke(*TINY_RUN, "--offload", "--keep-fill-outputs", "--out", path)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())["rows"]
    assert row["agrees"] is True and row["oomb"]["host_gib"] > 0 == row["transformers"]["host_gib"]
    assert "- + 0.0 host" in result.stdout
    result = invoke(*TINY_RUN, "--gpu-budget", 2)
    assert result.exit_code == 2 and "add --offload, or leave it out" in result.output


def test_out_of_memory_is_a_result(tmp_path, in_this_process, monkeypatch):
    def full(side, tokens, **_):
        if isinstance(side, OurSide):
            return measure_length(side, tokens, **_)
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(child, "measure_length", full)
    result = invoke(*TINY_RUN, "--out", tmp_path / "step.json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert row["transformers"] == {"failed": "out of memory"}
    assert (row["speed_ratio"], row["agrees"]) == (None, None)
    assert "out of memory" in result.stdout


def test_sampled_chunks_give_an_estimate_that_says_so(tmp_path, in_this_process):
    path = tmp_path / "sample.json"
    options = ["--sample", "--lengths", "160", "--keep-fill-outputs", "--out", path]
    result = invoke(*TINY_RUN, *options)
    assert result.exit_code == 0, result.output
    assert "estimated from sampled chunks" in result.stdout
    assert "transformers ..." not in result.stdout
    ours = json.loads(path.read_text())["rows"][0]["oomb"]
    assert ours["estimated"] == "estimated from sampled chunks"
    assert sorted(map(int, ours["fill_seconds"])) == [0, 4, 8]
    assert sorted(map(int, ours["sweep_seconds"])) == [0, 4, 9]
    assert ours["tokens_per_s"] == pytest.approx(160 / ours["step_seconds"][0])
    assert ours["loss"] is None


def test_between_sampled_chunks_is_interpolated():
    assert total({0: 1.0, 2: 3.0, 4: 4.0}, 5) == 1 + 2 + 3 + 3.5 + 4
    assert total({0: 1.5}, 1) == 1.5
    assert total({}, 0) == 0


def test_sampled_chunks_cost_what_they_cost_in_a_step():
    settings = check_step(StepOptions(shape="tiny", chunk=64, page=16, device="cpu"))
    side = OurSide(settings)
    ids = torch.randint(0, 512, (1, 320))
    clear(side)
    side.run(ids)
    measured = min(timed(lambda: side.run(ids), CPU)[1] for _ in range(3))
    estimated = sample_length(side, ids)["step_seconds"][0]
    assert measured / 4 < estimated < 4 * measured


def test_a_disagreement_is_exit_code_1(in_this_process, monkeypatch):
    monkeypatch.setattr(step_run, "MOST_APART", -1.0)
    result = invoke(*TINY_RUN)
    assert result.exit_code == 1
    assert "NO" in result.stdout


def test_a_side_that_dies_is_started_again_for_the_other_lengths(monkeypatch):
    started = []

    def run(command, **_):
        lengths = json.loads(command[-2])["lengths"]
        started.append(lengths)

        class Ended:
            returncode = 0 if 32 not in lengths else -6

        with open(command[-1], "a") as results:
            for tokens in lengths:
                if tokens == 32:
                    break
                results.write(json.dumps({"tokens": tokens, "failed": "out of memory"}) + "\n")
        return Ended

    monkeypatch.setattr(step_run.subprocess, "run", run)
    result = invoke(
        "step", "--shape", "tiny", "--device", "cpu", "--no-peer", "--lengths", "16,32,64"
    )
    assert started == [[16, 32, 64], [64]]
    assert result.exit_code == 1
    assert "exit code -6" in result.stdout


def test_settings_that_the_engine_refuses_are_bad_input(in_this_process, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = invoke(*TINY_RUN, "--backend", "triton")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "attention_backend='triton' cannot run here: it needs a CUDA GPU"
    )


@pytest.mark.slow
def test_bench_step_in_processes_of_their_own(tmp_path):
    result = invoke(*TINY_RUN, "--out", tmp_path / "step.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "step.json").read_text())["rows"][0]["agrees"] is True


def test_steps_repeat_until_the_time_is_over():
    settings = check_step(StepOptions(shape="tiny", layers=1, chunk=16, device="cpu"))
    side = OurSide(settings)
    keywords = {"device": CPU, "warmup": False, "split": False}
    once = measure_length(side, 16, seconds=0, **keywords)
    assert len(once["step_seconds"]) == 1
    longer = measure_length(side, 16, seconds=5 * once["step_seconds"][0], **keywords)
    times = longer["step_seconds"]
    assert sum(times[:-1]) < 5 * once["step_seconds"][0] <= sum(times)
    assert longer["grad_norm"] == pytest.approx(once["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "gpt5"], "--shape must be one of qwen2-7b, tiny, got 'gpt5'"),
        (["--shape", "qwen2-7b"], "needs a CUDA GPU: on a CPU use --shape tiny"),
        (["--layers", 0], "--layers must be at least 1"),
        (["--lengths", "none"], "--lengths must name at least one length"),
        (["--lengths", "1"], "--lengths must be at least 2, got 1"),
        (["--chunk", 100], "chunk_size must be a multiple of page_size, got chunk_size=100"),
        (["--policy", "none"], "activation_policy must be one of"),
        (["--grad-dtype", "int8"], "--grad-dtype must be one of bf16"),
        (
            ["--sample", "--lengths", "100"],
            "--lengths must be a multiple of --chunk, got 100 and 64",
        ),
        (["--backend", "fast"], "attention_backend must be one of"),
        (["--seconds", -1], "--seconds must be at least 0, got -1.0"),
        (["--split", -1], "--split must be at least 0, got -1"),
    ],
)
def test_bench_step_refuses(words, said):
    if "--shape" not in words:
        words = ["--shape", "tiny", *words]
    result = invoke("step", "--device", "cpu", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_help_names_both_benchmarks():
    assert set(SHAPES) == {"qwen2-7b", "tiny"}
    shown = invoke("--help").stdout
    assert "attention" in shown and "step" in shown
