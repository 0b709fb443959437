"""Pages in fp8 and page gradients in bf16: what is stored, and the gradients of that function."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from helpers import chunked_run, gradients, tiny_model, true_fp64, whole_run, worst_error
from transformers import AttentionInterface

import oomb
from oomb.cache import StochasticRounding, fp8
from oomb.chunking import ChunkPlan, plan_chunks

SIZES = {"chunk_size": 12, "page_size": 4, "segment_pages": 2}
LENGTHS = {
    "one row": ([53], [[0]]),
    "short last page": ([50, 50], [[0], [0]]),
    "documents": ([53, 30], [[0, 17, 19, 40], [0, 2]]),  # pages that chunk borders cut
}


def batch(kind: str) -> dict[str, torch.Tensor]:
    lengths, starts = LENGTHS[kind]
    rows, tokens = len(lengths), max(lengths)
    found = {"input_ids": torch.randint(1, 97, (rows, tokens))}
    if kind == "documents":
        documents = torch.zeros(rows, tokens, dtype=torch.int64)
        for row, each in enumerate(starts):
            for start in each[1:]:
                documents[row, start:] += 1
        inside = torch.arange(tokens) < torch.tensor(lengths)[:, None]
        found |= {"document_ids": documents, "attention_mask": inside.long()}
    return found


# -- the oracle -----------------------------------------------------------------------------------


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounded to numbers of 3 bits behind the first, down to 2^-9, by arithmetic alone."""
    exponent = x.abs().clamp(min=2.0**-6).log2().floor()
    step = 2.0 ** (exponent - 3)
    return (x / step).round() * step


def page_by_page(x: torch.Tensor, plan: ChunkPlan, page_size: int) -> torch.Tensor:
    """Whole K or V [B, heads, N, dim] as pages hold it; token ranges and heads one by one."""
    x = x.clone()
    for chunk in plan.chunks:
        for write in chunk.writes:
            at = write.first
            while at < write.last:
                stop = min((at // page_size + 1) * page_size, write.last)
                offset = chunk.start + write.start - write.first
                for head in range(x.shape[1]):
                    here = x[write.row, head, at + offset : stop + offset]
                    scale = 1.0
                    while here.abs().max() / scale > 448:
                        scale *= 2
                    while 0 < here.abs().max() / scale <= 224:
                        scale /= 2
                    here.copy_(e4m3(here / scale) * scale)
                at = stop
    return x


def attention_over_pages(plan: ChunkPlan, page_size: int, documents: torch.Tensor | None):
    """As transformers calls it; other chunks' K and V are rounded, and gradients pass that."""

    def attention(module, q, k, v, mask, scaling, dropout=0.0, **_):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        there_k, there_v = (
            x + (page_by_page(x.detach(), plan, page_size) - x).detach() for x in (k, v)
        )
        i = torch.arange(q.shape[2])
        own = i[:, None] // 12 == i // 12
        seen = i[:, None] >= i
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None])
        scores = torch.where(own, q @ k.mT, q @ there_k.mT) * scaling
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out = weights.where(own, 0) @ v + weights.where(~own, 0) @ there_v
        return out.transpose(1, 2).contiguous(), None

    return attention


def oracle(model, kind: str, arguments: dict[str, torch.Tensor]):
    """Loss and gradients of the ordinary run whose keys are what pages hold."""
    plan = plan_chunks(*LENGTHS[kind], chunk_size=12, page_size=4)
    ids, documents = arguments["input_ids"], arguments.get("document_ids")
    labels = ids.clone()
    extra = {}
    if documents is not None:
        first = torch.ones_like(ids, dtype=torch.bool)
        first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        labels[first | (arguments["attention_mask"] == 0)] = -100
        at = torch.arange(ids.shape[1]).expand_as(ids)
        extra["position_ids"] = at - at.where(first, 0).cummax(1).values
    AttentionInterface.register("rounded", attention_over_pages(plan, 4, documents))
    before = model.config._attn_implementation
    model.set_attn_implementation("rounded")
    try:
        return whole_run(model, ids, labels=labels, **extra)
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("one row", "keep"),
        ("short last page", "selective"),
        ("documents", "selective"),
        ("documents", "layer"),
    ],
)
@pytest.mark.parametrize("offload", [None, oomb.OffloadConfig(poison=True)], ids=["", "offload"])
def test_gradients_are_those_of_attention_over_rounded_pages(kind, policy, offload):
    model, arguments = tiny_model("llama"), batch(kind)
    settings = {**SIZES, "activation_policy": policy, "check_replay": True, "offload": offload}
    with true_fp64():
        loss, expected = oracle(model, kind, arguments)
        ids = arguments.pop("input_ids")
        found, grads = chunked_run(model, ids, {**settings, "page_dtype": "fp8"}, **arguments)
        exact, _ = chunked_run(model, ids, settings, **arguments)
    assert float(found) == pytest.approx(float(loss), rel=1e-12)
    assert abs(float(exact - loss)) > 1e-6  # rounding is there
    error, name = worst_error(grads, expected)
    assert error < 1e-10, (name, error)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"segment_pages": 1},
        {"segment_pages": 100},
        {"keep_fill_outputs": True},
        {"live_chunks": 2, "activation_policy": "keep"},
        {"attention_backend": "reference"},
        {"page_dtype": "fp8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["short last page", "documents"])
def test_both_options_have_the_same_bits_on_two_tiers(settings, kind):
    model, arguments = tiny_model("qwen2", torch.float32), batch(kind)
    ids = arguments.pop("input_ids")
    settings = {**SIZES, "page_grad_dtype": torch.bfloat16, **settings}
    settings = {"page_dtype": "fp8", **settings}
    results = []
    for offload in (None, oomb.OffloadConfig(poison=True)):
        torch.manual_seed(5)
        results.append(chunked_run(model, ids, {**settings, "offload": offload}, **arguments))
    (loss, grads), (other_loss, others) = results
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(grads[name], others[name]) for name in grads)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("mistral", {"sliding_window": 20}), ("qwen3_moe", {}), ("gpt2", {})],
)
def test_other_models_keep_their_pages_so_too(family, changes):
    model = tiny_model(family, torch.bfloat16, **changes)
    ids = batch("short last page")["input_ids"]
    settings = {**SIZES, "page_grad_dtype": torch.bfloat16, "page_dtype": "fp8"}
    settings |= {"check_replay": True, "activation_policy": "layer"}
    results = [
        chunked_run(model, ids, {**settings, "offload": offload})
        for offload in (None, oomb.OffloadConfig(poison=True))
    ]
    (loss, grads), (other_loss, others) = results
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(grads[name], others[name]) for name in grads)
    _, exact = chunked_run(model, ids, SIZES)
    error, _ = worst_error(grads, exact)
    assert 1e-3 < error < 0.5


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize(
    ("settings", "limit"),
    [({"page_dtype": "fp8"}, 1e-4), ({"page_grad_dtype": torch.bfloat16}, 1e-2)],
    ids=str,
)
def test_triton_attends_to_them(settings, limit):
    model = tiny_model("llama", torch.float32, num_hidden_layers=1, head_dim=16)
    ids = torch.randint(1, 97, (1, 26))
    settings = {**SIZES, "activation_policy": "keep", **settings}
    results = [
        chunked_run(model, ids, {**settings, "attention_backend": backend})[1]
        for backend in ("triton", "reference")
    ]
    error, name = worst_error(*results)
    assert error < limit, name


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "library"])
def test_both_options_on_a_gpu(backend):
    model = tiny_model("llama", torch.bfloat16, hidden_size=64, head_dim=16).cuda()
    ids = torch.randint(0, 97, (2, 1000), device="cuda")
    sizes = {"chunk_size": 96, "page_size": 16, "segment_pages": 4, "attention_backend": backend}
    low = {"page_dtype": "fp8", "page_grad_dtype": torch.bfloat16}
    sizes |= {"deterministic": backend == "triton"}
    results = []
    for offload in (None, oomb.OffloadConfig(poison=True)):
        torch.manual_seed(5)
        results.append(chunked_run(model, ids, {**sizes, **low, "offload": offload})[1])
    found, others = results
    for name, grad in found.items():
        if backend == "triton":
            assert torch.equal(grad, others[name]), name
        else:
            assert (others[name] - grad).norm() <= 5e-2 * grad.norm(), name
    _, exact = chunked_run(model, ids, sizes)
    error, name = worst_error(found, exact)
    assert 1e-3 < error < 0.5, name


# -- fp8 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [0, 3])
def test_rounding_is_small_and_happens_once(dtype, first):
    size = torch.tensor([1e-4, 1.0, 3e3]).repeat_interleave(7)[:, None]
    x = (torch.randn(2, 21, 16) * size).to(dtype)
    x[:, :5] = 0
    once = fp8.rounded(x, first, 7)
    assert once.dtype == dtype and not torch.equal(once, x)
    assert torch.equal(fp8.rounded(once, first, 7), once)
    assert not once[:, :5].any()
    largest = x.double().abs().max()
    assert ((once - x).double().abs() <= x.double().abs() / 16 + largest * 2**-17).all()


def test_a_scale_is_a_power_of_two_that_uses_the_range():
    x = torch.randn(3, 40, 8) * torch.logspace(-6, 6, 40)[:, None]
    scales = fp8.page_scales(x, 0, 5)
    assert scales.shape == (3, 8) and torch.equal(scales.log2(), scales.log2().round())
    largest = x.unflatten(1, (8, 5)).abs().amax((2, 3)) / scales
    assert (largest <= 448).all() and (largest > 224).all()


def test_what_is_not_finite_shows_and_harms_no_other_page():
    x = torch.randn(1, 8, 4)
    x[0, 1, 2], x[0, 2, 0] = float("nan"), float("inf")
    out = fp8.rounded(x, 0, 4)
    assert out[0, :4].isnan().all() and out[0, 4:].isfinite().all()
    assert fp8.rounded(x[:, 2:], 2, 4)[0, :2].isnan().all()


def test_a_key_of_every_size_stays_finite_and_near():
    for dtype in (torch.float32, torch.float64):
        for size in (0.0, 1e-45, 1e-40, 1e-30, 1e30):
            x = torch.full((1, 4, 2), size, dtype=dtype)
            torch.testing.assert_close(fp8.rounded(x, 0, 4), x, rtol=0.07, atol=1e-38)


# -- stochastic rounding --------------------------------------------------------------------------

CPU = torch.device("cpu")


def store_on_cpu(x, out):
    StochasticRounding(CPU, [1]).store(x, out)


def store_by_kernel(x, out):
    pytest.importorskip("triton", reason="needs Triton")
    from oomb.cache.stochastic_kernel import fused_store

    fused_store(x, out, 2**62 + 3)


@pytest.fixture(params=[store_on_cpu, store_by_kernel])
def store(request):
    """The kernel runs in Triton's interpreter where there is no GPU."""
    return request.param


def test_rounding_is_unbiased_and_to_a_neighbour(store):
    exact = torch.randn(64) * torch.logspace(-20, 20, 64)
    out = torch.empty(4000, 64, dtype=torch.bfloat16)
    store(exact.repeat(2, 2000).view(2, 2000, 1, 64), out.view(2, 2000, 1, 64))
    down = (exact.view(torch.int32) & -65536).view(torch.float32)
    up = ((exact.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((out == down) | (out == up)).all() and (out == down).any() and (out == up).any()
    mean = out.double().mean(0)
    spread = (up - down).double().abs() * 0.5 / 4000**0.5
    assert ((mean - exact.double()).abs() < 5 * spread).all()
    nearest = exact.bfloat16().double()
    assert ((nearest - exact.double()).abs() > 5 * spread).sum() > 32  # such a bias would show


def test_what_is_bf16_already_and_what_is_not_finite_stays(store):
    """Written into a part of a slot: what lies before and behind is untouched."""
    x = torch.randn(2, 700, 1, 3).bfloat16()
    x[0, 0, 0] = torch.tensor([float("inf"), -float("inf"), 0.0])
    out = torch.full((2, 704, 1, 3), 5.0, dtype=torch.bfloat16)
    store(x.float(), out[:, 2:702])
    assert torch.equal(out[:, 2:702], x)
    assert (out[:, :2] == 5).all() and (out[:, 702:] == 5).all()
    store(torch.full((2, 4, 1, 3), float("nan")), out[:, :4])
    assert out[:, :4].isnan().all() and not out[:, 4:].isnan().any()


def test_random_numbers_of_calls_and_of_k_and_v_differ(store):
    x = torch.full((2, 500, 1, 4), 1.002)
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    store(x, out)
    assert 0.2 < float((out[0] == out[1]).float().mean()) < 0.8  # up in a quarter of both: 0.62
    again = torch.empty_like(out)
    store(x, again)
    assert torch.equal(out, again)
    rounding = StochasticRounding(CPU, [1])
    for each in (out, again):
        rounding.store(x, each)
    assert not torch.equal(out, again)


def test_small_terms_are_not_lost():
    """A thousand terms of a thousandth: to nearest, the sum stops far below."""
    total = torch.ones(2000, dtype=torch.bfloat16)
    nearest = torch.ones(1, dtype=torch.bfloat16)
    rounding = StochasticRounding(CPU, [3])
    for _ in range(1000):
        rounding.store(total.float() + 1e-3, total)
        nearest = (nearest.float() + 1e-3).bfloat16()
    assert float(nearest) == 1.0
    assert float(total.double().mean()) == pytest.approx(2.0, abs=0.01)


def step(model, seed: int, steps: int = 1, **settings):
    torch.manual_seed(seed)
    ids = torch.randint(1, 97, (1, 90), generator=torch.Generator().manual_seed(1))
    found = []
    config = oomb.EngineConfig(**{**SIZES, "page_grad_dtype": torch.bfloat16, **settings})
    with oomb.Engine(model, config) as engine:
        for _ in range(steps):
            engine.step(ids)
            found.append(gradients(model))
            model.zero_grad()
    return found, torch.get_rng_state()


def test_the_seed_says_the_bits_and_the_models_generators_stay():
    model = tiny_model("llama", torch.float32)
    (first, second), state = step(model, 5, steps=2)
    (again,), _ = step(model, 5)
    (other,), _ = step(model, 6)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert all(torch.equal(first[each], again[each]) for each in first)
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], second[name])  # each step has numbers of its own
    _, untouched = step(model, 5, steps=2, page_grad_dtype=torch.float32)
    assert torch.equal(state, untouched)


def test_the_mean_over_seeds_is_the_gradient():
    model = tiny_model("llama", torch.float32)
    (exact,), _ = step(model, 0, page_grad_dtype=torch.float32)
    runs = [step(model, seed)[0][0] for seed in range(24)]
    name = "model.layers.1.self_attn.v_proj.weight"
    errors = [float((run[name] - exact[name]).norm()) for run in runs]
    mean = sum(run[name] for run in runs) / len(runs)
    assert float((mean - exact[name]).norm()) < 0.35 * sum(errors) / len(errors)  # 24^-0.5 is 0.2
    assert min(errors) > 0


def test_rounding_to_nearest_is_left_to_the_kernel():
    model = tiny_model("llama", torch.float32)
    (nearest,), _ = step(model, 0, page_grad_rounding="nearest")
    (other,), _ = step(model, 1, page_grad_rounding="nearest")
    assert all(torch.equal(nearest[name], other[name]) for name in nearest)
    (exact,), _ = step(model, 0, page_grad_dtype=torch.float32)
    error, _ = worst_error(nearest, exact)
    assert 1e-4 < error < 2e-2


@pytest.mark.gpu
def test_rounding_on_a_gpu_is_unbiased_and_repeats():
    x = (torch.randn(2, 4, 1, 64) * 3).repeat(1, 2000, 1, 1).cuda()
    found = []
    for _ in range(2):
        out = torch.empty_like(x, dtype=torch.bfloat16)
        StochasticRounding(x.device, [4]).store(x, out)
        found.append(out)
    assert torch.equal(*found)
    mean, exact = (each.double().unflatten(1, (2000, 4)).mean(1) for each in (found[0], x))
    assert ((mean - exact).abs() <= 5 * exact.abs() * 2**-8 / 2000**0.5).all()


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"page_dtype": "fp4"}, "page_dtype must be one of None, 'fp8', got 'fp4'"),
        ({"page_dtype": torch.float8_e4m3fn}, "page_dtype must be one of None, 'fp8', got"),
        ({"page_grad_rounding": "up"}, "page_grad_rounding must be one of 'stochastic', 'nearest'"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        oomb.EngineConfig(**settings)


def test_both_are_off_by_default():
    config = oomb.EngineConfig()
    assert config.page_dtype is None and not config.rounds_stochastically
