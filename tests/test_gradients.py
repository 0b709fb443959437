"""Where a step's gradients go: dtype, accumulation, hooks, frozen and tied parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import gradients, relative_error, tiny_model, whole_run, worst_error
from torch import nn
from untouched import changes, picture

import oomb

SIZES = {"chunk_size": 12, "page_size": 4, "attention_backend": "reference"}
ROUNDING = 2e-5
"""fp32 relative difference of a parameter's gradient between chunked and whole runs."""


def engine_for(model: nn.Module, **settings: Any) -> oomb.Engine:
    return oomb.Engine(model, oomb.EngineConfig(**{**SIZES, **settings}))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (2, 29), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def model() -> nn.Module:
    return tiny_model("qwen2", torch.float32)


# -- dtype ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "wanted", "came"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float64, torch.float64),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
    ids=str,
)
def test_gradients_have_grad_dtype_or_wider(
    ids: torch.Tensor, parameter: torch.dtype, wanted: torch.dtype, came: torch.dtype
) -> None:
    model = tiny_model("qwen2", parameter)
    with engine_for(model, grad_dtype=wanted) as engine:
        engine.step(ids)
    assert {p.grad.dtype for p in model.parameters()} == {came}
    assert {p.dtype for p in model.parameters()} == {parameter}


def test_fp32_gradients_of_a_bf16_model_are_not_rounded_sums(ids: torch.Tensor) -> None:
    def run(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = tiny_model("qwen2", torch.bfloat16)
        engine_for(model, grad_dtype=dtype, chunk_size=4).step(ids)
        return gradients(model)

    wide, narrow = run(torch.float32), run(torch.bfloat16)
    # the summed gradient is no bf16 number, so adding up took place in fp32
    off = [n for n, g in wide.items() if not torch.equal(g.bfloat16().double(), g)]
    assert off == list(wide)
    assert worst_error(narrow, wide)[0] < 0.05


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_an_existing_gradient_of_another_dtype_is_refused(
    ids: torch.Tensor, wanted: torch.dtype
) -> None:
    model = tiny_model("qwen2", torch.bfloat16)
    other = torch.bfloat16 if wanted == torch.float32 else torch.float32
    with engine_for(model, grad_dtype=other) as engine:
        engine.step(ids)
    before = picture(model)
    with engine_for(model, grad_dtype=wanted) as engine:
        with pytest.raises(
            TypeError, match=rf"gradient of .* {wanted} \(grad_dtype\), got {other}"
        ):
            engine.step(ids)
        assert changes(before, picture(model)) == []
        model.zero_grad(set_to_none=True)
        engine.step(ids)
    assert {p.grad.dtype for p in model.parameters()} == {wanted}


def test_an_ordinary_backward_adds_to_the_steps_fp32_gradients(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.bfloat16)
    with engine_for(model) as engine:
        engine.step(ids)
        once = gradients(model)
        model(input_ids=ids, labels=ids).loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    head = "lm_head.weight"  # the gradient that bf16 rounds least
    assert relative_error(gradients(model)[head], 2 * once[head]) < 0.02


def test_close_gives_grad_dtypes_back_where_no_gradient_is(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.bfloat16)
    before = picture(model)
    with engine_for(model) as engine:
        engine.step(ids)
        model.zero_grad(set_to_none=True)
        engine.evaluate(ids)
    assert changes(before, picture(model)) == []
    model(input_ids=ids, labels=ids).loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}


def test_close_leaves_gradients_to_the_user(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.bfloat16)
    engine = engine_for(model)
    engine.step(ids)
    kept = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    engine.close()
    for name, parameter in model.named_parameters():
        assert parameter.grad is kept[name][0]
        assert torch.equal(parameter.grad, kept[name][1])


# -- what gets gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("restore", [False, True])
def test_steps_add_up(model: nn.Module, ids: torch.Tensor, restore: bool) -> None:
    other = torch.randint(0, 97, (1, 13))
    first, second = whole_run(model, ids)[1], whole_run(model, other)[1]
    with engine_for(model, restore_grads=restore) as engine:
        engine.step(ids)
        kept = {name: p.grad for name, p in model.named_parameters()}
        engine.step(other)
    assert worst_error(gradients(model), {n: first[n] + second[n] for n in first})[0] < ROUNDING
    assert all(p.grad is kept[name] for name, p in model.named_parameters())


def test_a_step_adds_to_an_ordinary_backward(model: nn.Module, ids: torch.Tensor) -> None:
    expected = {name: 2 * grad for name, grad in whole_run(model, ids)[1].items()}
    with engine_for(model) as engine:
        model(input_ids=ids, labels=ids).loss.backward()
        engine.step(ids)
    assert worst_error(gradients(model), expected)[0] < ROUNDING


@pytest.fixture(scope="module")
def engines() -> dict[str, oomb.Engine]:
    """An engine of each activation policy, all on one model."""
    model = tiny_model("qwen2", torch.float32)
    return {policy: engine_for(model, activation_policy=policy) for policy in POLICIES}


POLICIES = ("keep", "selective", "layer")
TRAINED: dict[str, Callable[[str], bool]] = {
    "head": lambda name: name == "lm_head.weight",
    "last norm": lambda name: name == "model.norm.weight",
    "embedding": lambda name: "embed_tokens" in name,
    "first k": lambda name: "layers.0.self_attn.k_proj.weight" in name,
    "first v bias": lambda name: "layers.0.self_attn.v_proj.bias" in name,
    "first q": lambda name: "layers.0.self_attn.q_proj.weight" in name,
    "last k": lambda name: "layers.1.self_attn.k_proj.weight" in name,
    "middle norm": lambda name: "layers.0.post_attention_layernorm" in name,
    "last mlp": lambda name: "layers.1.mlp" in name,
    "all but the embedding": lambda name: "embed_tokens" not in name,
    "second layer": lambda name: "layers.1" in name,
    "biases": lambda name: name.endswith("bias"),
}


@pytest.mark.parametrize(
    ("trained", "policy"),
    [(name, "selective") for name in TRAINED]
    + [(name, policy) for name in ("first k", "last mlp") for policy in ("keep", "layer")],
)
def test_frozen_parameters_get_no_gradient(
    engines: dict[str, oomb.Engine], ids: torch.Tensor, trained: str, policy: str
) -> None:
    model = engines[policy]._model.whole
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED[trained](name))
    loss, expected = whole_run(model, ids)
    assert len(expected) > 0
    result = engines[policy].step(ids)
    assert relative_error(result.loss.double(), loss) < 1e-6
    assert worst_error(gradients(model), expected)[0] < ROUNDING
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert all(p.grad is None for p in frozen)


def test_freezing_between_steps(model: nn.Module, ids: torch.Tensor) -> None:
    model.model.embed_tokens.requires_grad_(False)
    with engine_for(model) as engine:
        engine.step(ids)
        model.zero_grad(set_to_none=True)
        model.requires_grad_(False)
        model.model.embed_tokens.requires_grad_(True)
        expected = whole_run(model, ids)[1]
        engine.step(ids)
    assert list(expected) == ["model.embed_tokens.weight"]
    assert worst_error(gradients(model), expected)[0] < ROUNDING


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_tied_embeddings_get_both_gradients(ids: torch.Tensor, family: str) -> None:
    model = tiny_model(family, torch.float32, tie_word_embeddings=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    loss, expected = whole_run(model, ids)
    with engine_for(model) as engine:
        result = engine.step(ids)
    assert relative_error(result.loss.double(), loss) < 1e-6
    assert worst_error(gradients(model), expected)[0] < ROUNDING


def test_a_parameter_that_no_token_reaches_has_no_gradient(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.float32)
    model.unused = nn.Linear(3, 3)
    with engine_for(model) as engine:
        engine.step(ids)
    assert model.unused.weight.grad is None
    assert model.lm_head.weight.grad is not None


# -- hooks ----------------------------------------------------------------------------------------


def test_register_hook_is_refused(model: nn.Module, ids: torch.Tensor) -> None:
    hook = model.model.layers[1].mlp.up_proj.weight.register_hook(lambda grad: grad)
    with engine_for(model) as engine:
        before = picture(model)
        for call in (engine.step, engine.iter_step):
            with pytest.raises(
                ValueError,
                match=r"layers.1.mlp.up_proj.weight has a register_hook.*post_accumulate",
            ):
                call(ids)
            assert changes(before, picture(model)) == []
        assert torch.isfinite(engine.evaluate(ids))
        hook.remove()
        engine.step(ids)


def watch(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Names and gradients, as post-accumulate hooks see them."""
    fired: list[tuple[str, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: fired.append((name, p.grad.double().clone()))
        )
    return fired


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("existing", [False, True])
def test_hooks_fire_once_with_the_complete_gradient(
    model: nn.Module, ids: torch.Tensor, existing: bool, restore: bool
) -> None:
    expected = whole_run(model, ids)[1]
    with engine_for(model, restore_grads=restore) as engine:
        if existing:
            engine.step(ids)
            expected = {name: 2 * grad for name, grad in expected.items()}
        fired = watch(model)
        before = picture(model, gradients=False)
        engine.step(ids)
        assert changes(before, picture(model, gradients=False)) == []
    assert sorted(name for name, _ in fired) == sorted(expected)
    assert worst_error(dict(fired), expected)[0] < ROUNDING


def test_hooks_wait_until_the_last_chunk(model: nn.Module, ids: torch.Tensor) -> None:
    fired = watch(model)
    with engine_for(model) as engine:
        for _ in engine.iter_step(ids):
            assert fired == []
        assert len(fired) == len(list(model.parameters()))


def test_a_hook_of_a_tied_parameter_fires_once(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.float32, tie_word_embeddings=True)
    expected = whole_run(model, ids)[1]
    fired = watch(model)
    with engine_for(model) as engine:
        engine.step(ids)
    assert sorted(name for name, _ in fired) == sorted(expected)
    assert worst_error(dict(fired), expected)[0] < ROUNDING


def test_several_hooks_of_a_parameter_fire_in_order(model: nn.Module, ids: torch.Tensor) -> None:
    order: list[str] = []
    weight = model.lm_head.weight
    weight.register_post_accumulate_grad_hook(lambda p: order.append("first"))
    weight.register_post_accumulate_grad_hook(lambda p: order.append("second"))
    with engine_for(model) as engine:
        engine.step(ids)
        engine.step(ids)
    assert order == ["first", "second"] * 2


def test_hooks_of_experts_fire_once_also_where_a_chunk_uses_none_of_them() -> None:
    # eager experts run in a Python loop, so an expert without tokens leaves the graph
    model = tiny_model("qwen3_moe", torch.float32, router_aux_loss_coef=0.0)
    experts, others = torch.tensor([[5] * 16 + [9] * 16]), torch.tensor([[5] * 32])
    expected = whole_run(model, experts)[1]
    assert _unused(whole_run(model, others)[1]) > _unused(expected)
    fired = watch(model)
    with engine_for(model) as engine:
        engine.step(experts)
    names = [name for name, _ in fired]
    assert len(names) == len(set(names))
    assert set(names) == {name for name, p in model.named_parameters() if p.grad is not None}
    assert worst_error(gradients(model), expected)[0] < ROUNDING
    assert worst_error(dict(fired), {name: expected[name] for name in names})[0] < ROUNDING


def _unused(grads: dict[str, torch.Tensor]) -> int:
    """Experts without gradient, over all layers."""
    return sum(
        int((grad.flatten(1).norm(dim=1) == 0).sum())
        for name, grad in grads.items()
        if "experts" in name
    )


def test_optimizer_in_hook_takes_the_same_step(ids: torch.Tensor) -> None:
    ordinary = tiny_model("qwen2", torch.float32)
    optimizer = torch.optim.SGD(ordinary.parameters(), lr=0.5, momentum=0.9)
    chunked = tiny_model("qwen2", torch.float32)
    optimizers = {p: torch.optim.SGD([p], lr=0.5, momentum=0.9) for p in chunked.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    with engine_for(chunked) as engine:
        for _ in range(3):
            engine.step(ids)
            ordinary(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in optimizers)
    moved = dict(chunked.named_parameters())
    for name, parameter in ordinary.named_parameters():
        assert relative_error(moved[name].detach(), parameter.detach()) < ROUNDING, name


def test_hooks_run_without_autograd(model: nn.Module, ids: torch.Tensor) -> None:
    weight = model.lm_head.weight
    weight.register_post_accumulate_grad_hook(lambda p: p.sub_(0.5 * p.grad))
    expected = (
        weight.detach()
        - 0.5 * whole_run(tiny_model("qwen2", torch.float32), ids)[1]["lm_head.weight"]
    )
    with engine_for(model) as engine:
        engine.step(ids)
    assert relative_error(weight.detach().double(), expected) < ROUNDING


def test_hooks_of_parameters_fire_in_the_parameters_order(
    model: nn.Module, ids: torch.Tensor
) -> None:
    # in every process alike, or hooks that talk to other processes would wait for ever
    fired = watch(model)
    with engine_for(model) as engine:
        engine.step(ids)
    assert [name for name, _ in fired] == [name for name, _ in model.named_parameters()]


def test_hooks_may_come_and_go_between_chunks(model: nn.Module, ids: torch.Tensor) -> None:
    fired: list[str] = []
    weight = model.lm_head.weight
    leaving = weight.register_post_accumulate_grad_hook(lambda p: fired.append("leaving"))
    with engine_for(model) as engine:
        steps = engine.iter_step(ids)
        for _ in range(3):
            next(steps)
        leaving.remove()
        weight.register_post_accumulate_grad_hook(lambda p: fired.append("coming"))
        assert fired == []
        assert len(list(steps)) == 2
    assert fired == ["coming"]
    assert len(weight._post_accumulate_grad_hooks) == 1


def test_an_ordinary_backward_between_chunks_fires_hooks(
    model: nn.Module, ids: torch.Tensor
) -> None:
    expected = {name: 2 * grad for name, grad in whole_run(model, ids)[1].items()}
    fired = watch(model)
    with engine_for(model) as engine:
        for state in engine.iter_step(ids):
            if (state.phase, state.chunk) == ("sweep", 2):
                model(input_ids=ids, labels=ids).loss.backward()
                assert len(fired) == len(expected)
    assert len(fired) == 2 * len(expected)
    assert worst_error(gradients(model), expected)[0] < ROUNDING


def test_a_hook_that_raises_leaves_complete_gradients(model: nn.Module, ids: torch.Tensor) -> None:
    expected = whole_run(model, ids)[1]

    def fail(_: torch.Tensor) -> None:
        raise OSError("disk full")

    hook = model.lm_head.weight.register_post_accumulate_grad_hook(fail)
    with engine_for(model) as engine:
        with pytest.raises(OSError, match="disk full"):
            engine.step(ids)
        assert worst_error(gradients(model), expected)[0] < ROUNDING
        hook.remove()
        model.zero_grad(set_to_none=True)
        engine.step(ids)
    assert worst_error(gradients(model), expected)[0] < ROUNDING


@pytest.mark.parametrize("coefficient", [0.5, None])
def test_router_settings_are_read_at_every_step(
    ids: torch.Tensor, coefficient: float | None
) -> None:
    model = tiny_model("qwen3_moe", torch.float32, router_aux_loss_coef=0.1)
    with engine_for(model) as engine:
        engine.step(ids)
        model.zero_grad(set_to_none=True)
        if coefficient is None:
            model.config.output_router_logits = False
        else:
            model.router_aux_loss_coef = coefficient
        loss, expected = whole_run(model, ids)
        result = engine.step(ids)
        assert relative_error(result.loss.double(), loss) < 1e-6
        assert worst_error(gradients(model), expected)[0] < ROUNDING


# -- the model between steps and chunks -----------------------------------------------------------


def generate(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """A sampled continuation that leaves the generators as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return model.generate(ids[:, :9], max_new_tokens=6, do_sample=True, pad_token_id=0)


def test_the_model_works_as_ever_between_chunks(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.float32)
    loss, expected = whole_run(model, ids)
    generate(model, ids)  # transformers fills in the generation config on first use
    logits, sample = model(input_ids=ids).logits.detach(), generate(model, ids)
    with engine_for(model) as engine:
        before = picture(model, gradients=False)
        states = 0
        steps = engine.iter_step(ids)
        while True:
            assert changes(before, picture(model, gradients=False)) == []
            assert torch.equal(model(input_ids=ids).logits, logits)
            assert torch.equal(generate(model, ids), sample)
            try:
                next(steps)
            except StopIteration as end:
                result = end.value
                break
            states += 1
        assert states == 5
        assert torch.equal(generate(model, ids), sample)
    assert relative_error(result.loss.double(), loss) < 1e-6
    assert worst_error(gradients(model), expected)[0] < ROUNDING


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the older name works in every version
@pytest.mark.parametrize(
    ("policy", "reentrant"), [("keep", False), ("selective", False), ("selective", True)]
)
def test_gradient_checkpointing_stays_the_users(
    model: nn.Module, ids: torch.Tensor, policy: str, reentrant: bool
) -> None:
    expected = whole_run(model, ids)[1]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before = picture(model, gradients=False)
    with engine_for(model, activation_policy=policy) as engine:
        for _ in engine.iter_step(ids):
            assert model.is_gradient_checkpointing
        assert worst_error(gradients(model), expected)[0] < ROUNDING
    assert changes(before, picture(model, gradients=False)) == []
    assert worst_error(whole_run(model, ids)[1], expected)[0] < ROUNDING


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_config_is_given_back(ids: torch.Tensor, use_cache: bool, attention: str) -> None:
    model = tiny_model("qwen2", torch.float32)
    model.set_attn_implementation(attention)
    model.config.use_cache = use_cache
    before = picture(model)
    with engine_for(model) as engine:
        assert changes(before, picture(model)) == []
        for _ in engine.iter_step(ids):
            assert model.config._attn_implementation == attention
            assert model.config.use_cache is use_cache
        model.zero_grad(set_to_none=True)
    assert changes(before, picture(model)) == []


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gemma2", "gpt2"])
def test_forwards_and_hooks_are_given_back(ids: torch.Tensor, family: str) -> None:
    model = tiny_model(family, torch.float32)
    seen: list[int] = []
    model(input_ids=ids)  # transformers installs its own hooks on first use
    model.model_forward = model.forward  # an attribute of the user's own
    body = model.get_decoder()
    body.forward = body.forward  # a forward set on the instance, as accelerate does
    body.register_forward_hook(lambda *args: seen.append(1))
    before = picture(model)
    with engine_for(model) as engine:
        engine.step(ids)
        engine.evaluate(ids)
        model.zero_grad(set_to_none=True)
    assert changes(before, picture(model)) == []
    seen.clear()
    model(input_ids=ids)
    assert seen == [1]


def test_training_flags_are_the_users(model: nn.Module, ids: torch.Tensor) -> None:
    model.model.layers[0].eval()
    model.model.layers[1].mlp.eval()
    before = picture(model, gradients=False)
    with engine_for(model) as engine:
        engine.step(ids)
        engine.evaluate(ids)
        assert changes(before, picture(model, gradients=False)) == []


@pytest.mark.parametrize("grad", [True, False])
def test_a_step_works_whatever_the_callers_grad_mode(
    model: nn.Module, ids: torch.Tensor, grad: bool
) -> None:
    expected = whole_run(model, ids)[1]
    with engine_for(model) as engine, torch.set_grad_enabled(grad):
        for _ in engine.iter_step(ids):
            assert torch.is_grad_enabled() is grad
        assert torch.is_grad_enabled() is grad
    assert worst_error(gradients(model), expected)[0] < ROUNDING


def test_parameters_unfrozen_later_get_their_grad_dtype_back(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.bfloat16)
    model.lm_head.weight.requires_grad_(False)
    dtypes = {parameter.grad_dtype for parameter in model.parameters()}
    with engine_for(model) as engine:
        model.lm_head.weight.requires_grad_(True)
        engine.step(ids)
        assert model.lm_head.weight.grad.dtype == torch.float32
        model.zero_grad(set_to_none=True)
    assert {parameter.grad_dtype for parameter in model.parameters()} == dtypes


@pytest.mark.parametrize("order", ["nested", "crossed"])
def test_two_engines_give_grad_dtypes_back(ids: torch.Tensor, order: str) -> None:
    model = tiny_model("qwen2", torch.bfloat16)
    dtypes = {parameter.grad_dtype for parameter in model.parameters()}
    first = engine_for(model)
    first.step(ids)
    model.zero_grad(set_to_none=True)
    second = engine_for(model)
    second.step(ids)
    model.zero_grad(set_to_none=True)
    for engine in (first, second) if order == "crossed" else (second, first):
        engine.close()
    assert {parameter.grad_dtype for parameter in model.parameters()} == dtypes


def test_engines_one_after_the_other(model: nn.Module, ids: torch.Tensor) -> None:
    expected = whole_run(model, ids)[1]
    before = picture(model)
    with engine_for(model) as outer, engine_for(model, chunk_size=16) as inner:
        for engine in (outer, inner, outer):
            model.zero_grad(set_to_none=True)
            engine.step(ids)
            assert worst_error(gradients(model), expected)[0] < ROUNDING
        model.zero_grad(set_to_none=True)
    assert changes(before, picture(model)) == []
