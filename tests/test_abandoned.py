"""A step that raises or is left half-way leaves nothing behind, and the next one is right."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from helpers import gradients, relative_error, tiny_model, whole_run, worst_error
from torch import nn
from untouched import changes, picture

import oomb
from oomb.profiling import LiveBytes, Recorder, stage

SIZES = {"chunk_size": 8, "page_size": 4, "attention_backend": "reference"}
TOKENS, CHUNKS = 21, 3
YIELDS = 2 * CHUNKS - 1
ROUNDING = 2e-5
"""fp32 relative difference of a parameter's gradient between chunked and whole runs."""


class Halt(Exception):
    """What these tests throw into a step."""


def engine_for(model: nn.Module, **settings: Any) -> oomb.Engine:
    return oomb.Engine(model, oomb.EngineConfig(**{**SIZES, **settings}))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (2, TOKENS), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def model() -> nn.Module:
    """Residual dropout is on, so that every chunk draws random numbers."""
    return tiny_model("gpt2", torch.float32, resid_pdrop=0.1, embd_pdrop=0.1)


@pytest.fixture(scope="module")
def attached() -> oomb.Engine:
    return engine_for(tiny_model("gpt2", torch.float32, resid_pdrop=0.1, embd_pdrop=0.1))


@pytest.fixture
def engine(attached: oomb.Engine) -> oomb.Engine:
    """An engine that several tests leave in all kinds of places."""
    attached._model.whole.train().zero_grad(set_to_none=True)
    return attached


@contextmanager
def breaking(place: str, model: nn.Module, chunk: int, error: type[BaseException]) -> Iterator:
    """Inside, the `chunk`-th call of a place raises; counts from 0, only after attaching."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == chunk + 1:
            raise error("halt")

    layer = model.transformer.h[1]
    if place == "layer":  # the last layer's feed-forward: its K and V are in the pages by then
        handles = [layer.mlp.register_forward_pre_hook(count)]
    elif place == "loss":
        handles = [model.lm_head.register_forward_pre_hook(count)]
    else:  # the backward of the first layer: later layers have their gradients by then

        def enter(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(count)

        handles = [model.transformer.h[0].ln_1.register_forward_hook(enter)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# The fill runs chunks 0 and 1, so calls 0 and 1 of a layer are the fill and 2 is the sweep's first.
# The head has a quarter of a chunk per call: 3 calls for the last chunk, 4 for each other.
PLACES = {
    "first chunk of the fill": ("layer", 0),
    "last chunk of the fill": ("layer", 1),
    "forward of the sweep's first chunk": ("layer", 2),
    "loss of the sweep's first chunk": ("loss", 0),
    "loss in the middle of the sweep": ("loss", 4),
    "backward of the sweep's first chunk": ("backward", 0),
    "backward of the sweep's last chunk": ("backward", 2),
}


def step_breaks(
    engine: oomb.Engine,
    ids: torch.Tensor,
    place: str,
    error: type[BaseException] = Halt,
) -> None:
    """Run a step that raises at a named place; hooks and random states are as before."""
    model = engine._model.whole
    kind, chunk = PLACES[place]
    before = picture(model, gradients=False)
    with breaking(kind, model, chunk, error), pytest.raises(error):
        engine.step(ids)
    assert changes(before, picture(model, gradients=False)) == []


def right_again(engine: oomb.Engine, ids: torch.Tensor) -> None:
    """A step and an evaluation after all that give what the ordinary way gives."""
    model = engine._model.whole.eval()
    loss, expected = whole_run(model, ids)
    result = engine.step(ids)
    assert relative_error(result.loss.double(), loss) < 1e-6
    assert worst_error(gradients(model), expected)[0] < ROUNDING
    assert relative_error(engine.evaluate(ids).double(), loss) < 1e-6
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_that_were_none_are_none_again(
    engine: oomb.Engine, ids: torch.Tensor, place: str
) -> None:
    model = engine._model.whole
    step_breaks(engine, ids, place)
    assert all(p.grad is None for p in model.parameters())
    right_again(engine, ids)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_is_an_abandoned_step_too(
    engine: oomb.Engine, ids: torch.Tensor, error: type[BaseException]
) -> None:
    model = engine._model.whole
    step_breaks(engine, ids, "loss in the middle of the sweep", error)
    assert all(p.grad is None for p in model.parameters())
    right_again(engine, ids)


ZERO: dict[str, Callable[[nn.Module], None]] = {
    "set to None": lambda model: model.zero_grad(set_to_none=True),
    "zeroed in place": lambda model: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize(
    "place", ["loss in the middle of the sweep", "backward of the sweep's last chunk"]
)
def test_gradients_that_held_something_are_incomplete_until_zeroed(
    engine: oomb.Engine, ids: torch.Tensor, place: str, zero: str
) -> None:
    model = engine._model.whole
    engine.step(ids)
    step_breaks(engine, ids, place)
    before = picture(model)
    for call in (engine.step, engine.iter_step):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"gradient of .* did not finish; zero"):
                call(ids)
    assert changes(before, picture(model)) == []
    assert torch.isfinite(engine.evaluate(ids))
    ZERO[zero](model)
    right_again(engine, ids)


def test_another_engine_on_the_model_knows_of_incomplete_gradients(
    model: nn.Module, ids: torch.Tensor
) -> None:
    with engine_for(model) as engine:
        engine.step(ids)
        step_breaks(engine, ids, "backward of the sweep's last chunk")
    with engine_for(model) as engine:
        with pytest.raises(RuntimeError, match="did not finish"):
            engine.step(ids)
        model.zero_grad()
        right_again(engine, ids)


def test_a_parameter_zeroed_alone_does_not_hide_the_others(
    engine: oomb.Engine, ids: torch.Tensor
) -> None:
    model = engine._model.whole
    engine.step(ids)
    step_breaks(engine, ids, "backward of the sweep's last chunk")
    for name, parameter in model.named_parameters():
        if "lm_head" not in name and "wte" not in name:
            parameter.grad = None
    with pytest.raises(RuntimeError, match="wte"):
        engine.step(ids)


@pytest.mark.parametrize(
    "place",
    [
        "first chunk of the fill",
        "loss in the middle of the sweep",
        "backward of the sweep's last chunk",
    ],
)
def test_restore_grads_keeps_every_bit(model: nn.Module, ids: torch.Tensor, place: str) -> None:
    with engine_for(model, restore_grads=True) as engine:
        engine.step(ids)
        kept = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
        step_breaks(engine, ids, place)
        for name, parameter in model.named_parameters():
            assert parameter.grad is kept[name][0]
            assert torch.equal(parameter.grad, kept[name][1])
        model.eval()
        expected = whole_run(model, ids)[1]
        for name, parameter in model.named_parameters():
            parameter.grad = kept[name][0]
        engine.step(ids)
        total = {name: kept[name][1].double() + grad for name, grad in expected.items()}
        assert worst_error(gradients(model), total)[0] < ROUNDING


def test_a_fresh_ordinary_gradient_is_complete(engine: oomb.Engine, ids: torch.Tensor) -> None:
    model = engine._model.whole
    engine.step(ids)
    step_breaks(engine, ids, "backward of the sweep's last chunk")
    model.eval().zero_grad(set_to_none=True)
    expected = {name: 2 * grad for name, grad in whole_run(model, ids)[1].items()}
    model(input_ids=ids, labels=ids).loss.backward()
    engine.step(ids)
    assert worst_error(gradients(model), expected)[0] < ROUNDING


def test_gradients_are_complete_after_a_step_that_ended_in_the_fill(
    engine: oomb.Engine, ids: torch.Tensor
) -> None:
    model = engine._model.whole.eval()
    expected = {name: 2 * grad for name, grad in whole_run(model, ids)[1].items()}
    engine.step(ids)
    step_breaks(engine, ids, "last chunk of the fill")
    steps = engine.iter_step(ids)
    next(steps)
    steps.close()
    engine.step(ids)
    assert worst_error(gradients(model), expected)[0] < ROUNDING


@pytest.mark.parametrize("held", ["one", "half"])
def test_some_gradients_held_something(engine: oomb.Engine, ids: torch.Tensor, held: str) -> None:
    model = engine._model.whole
    engine.step(ids)
    names = [name for name, _ in model.named_parameters()]
    kept = names[:1] if held == "one" else names[::2]
    for name, parameter in model.named_parameters():
        if name not in kept:
            parameter.grad = None
    step_breaks(engine, ids, "backward of the sweep's last chunk")
    assert [n for n, p in model.named_parameters() if p.grad is not None] == kept


# -- iter_step left early -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yields", "left"),
    [(yields, "closed") for yields in range(1, YIELDS + 1)]
    + [(yields, left) for yields in (1, CHUNKS, YIELDS) for left in ("collected", "thrown into")],
)
def test_iter_step_left_at_each_yield(
    engine: oomb.Engine, ids: torch.Tensor, yields: int, left: str
) -> None:
    model = engine._model.whole
    before = picture(model)
    steps = engine.iter_step(ids)
    states = [next(steps) for _ in range(yields)]
    assert [(s.phase, s.chunk) for s in states] == ORDER[:yields]
    torch.rand(3)  # the user draws numbers of their own
    if left == "closed":
        steps.close()
        assert list(steps) == []
    elif left == "collected":
        del steps
        gc.collect()
    else:
        with pytest.raises(Halt):
            steps.throw(Halt())
    assert changes(before, _without_dtypes(picture(model), before)) == []
    right_again(engine, ids)


ORDER = [
    *(("fill", chunk) for chunk in range(CHUNKS - 1)),
    *(("sweep", chunk) for chunk in reversed(range(CHUNKS))),
]


def _without_dtypes(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """grad_dtype stays the engine's until it is closed."""
    return {key: before[key] if key.endswith("grad_dtype") else seen for key, seen in after.items()}


def test_a_generator_never_started_leaves_the_engine_free(
    engine: oomb.Engine, ids: torch.Tensor
) -> None:
    model = engine._model.whole
    before = picture(model)
    steps = engine.iter_step(ids)
    assert changes(before, picture(model)) == []
    engine.evaluate(ids)
    steps.close()
    assert changes(before, {**picture(model), "random": before["random"]}) == []
    right_again(engine, ids)


@pytest.mark.parametrize("restore", [False, True])
def test_a_step_refused_as_it_begins_touches_no_gradient(
    model: nn.Module, ids: torch.Tensor, restore: bool
) -> None:
    with engine_for(model, restore_grads=restore) as engine:
        engine.step(ids)
        steps = engine.iter_step(ids)
        hook = model.transformer.h[1].mlp.c_fc.weight.register_hook(lambda grad: grad)
        before = picture(model)
        with pytest.raises(ValueError, match="register_hook"):
            next(steps)
        assert changes(before, picture(model)) == []
        hook.remove()
        engine.step(ids)


def test_a_loop_left_with_break_frees_the_engine(engine: oomb.Engine, ids: torch.Tensor) -> None:
    model = engine._model.whole
    for state in engine.iter_step(ids):
        if state.phase == "sweep":
            break
    assert all(p.grad is None for p in model.parameters())
    right_again(engine, ids)


def test_arguments_changed_between_chunks_do_not_matter(
    engine: oomb.Engine, ids: torch.Tensor
) -> None:
    model = engine._model.whole.eval()
    labels = torch.where(torch.rand(ids.shape) < 0.3, -100, ids)
    mask = torch.ones_like(ids)
    expected = whole_run(model, ids, labels=labels)[1]
    arguments = [ids.clone(), labels, mask, torch.arange(TOKENS)[None], torch.zeros_like(ids)]
    for state in engine.iter_step(*arguments):
        if (state.phase, state.chunk) == ("fill", 0):
            for argument in arguments:
                argument.zero_()
    assert worst_error(gradients(model), expected)[0] < ROUNDING


def test_sparse_gradients_are_marked_too(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.float32, tie_word_embeddings=False)
    model.model.embed_tokens.sparse = True
    with engine_for(model) as engine:
        engine.step(ids)
        steps = engine.iter_step(ids)
        for _ in range(YIELDS):
            next(steps)
        steps.close()
        with pytest.raises(RuntimeError, match="embed_tokens.*did not finish"):
            engine.step(ids)
        model.zero_grad()
        right_again(engine, ids)


@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("way", ["raise", "break"])
def test_leaving_the_with_block_inside_a_step(
    model: nn.Module, ids: torch.Tensor, way: str, kept: bool
) -> None:
    before = picture(model)
    steps: Iterator | None = None

    def leave() -> None:
        nonlocal steps
        with engine_for(model) as engine:
            generator = engine.iter_step(ids)
            steps = generator if kept else None
            for state in generator:
                if state.phase == "sweep" and way == "raise":
                    raise Halt("the user's own error")
                if state.phase == "sweep":
                    break

    if way == "raise":
        with pytest.raises(Halt, match="own error"):
            leave()
    else:
        leave()
    assert changes(before, picture(model)) == []
    assert steps is None or list(steps) == []


def test_two_engines_do_not_share_a_step(model: nn.Module, ids: torch.Tensor) -> None:
    with engine_for(model) as first, engine_for(model) as second:
        steps = first.iter_step(ids)
        next(steps)
        for call in (second.step, second.iter_step, second.evaluate):
            with pytest.raises(RuntimeError, match="under way"):
                call(ids)
        steps.close()
        right_again(second, ids)
        right_again(first, ids)


def test_steps_of_two_models_may_end_in_any_order(ids: torch.Tensor) -> None:
    recorders = [Recorder(), Recorder()]
    engines = [
        engine_for(tiny_model("qwen2", torch.float32), recorder=recorder) for recorder in recorders
    ]
    first, second = (engine.iter_step(ids) for engine in engines)
    for steps in (first, second, first):
        next(steps)
    first.close()
    assert len(list(second)) == YIELDS - 1
    counts = [len(recorder.events) for recorder in recorders]
    with stage("attention"):  # outside of any step: nobody listens
        pass
    assert [len(recorder.events) for recorder in recorders] == counts
    assert all(event.phase for recorder in recorders for event in recorder.events)
    for engine in engines:
        right_again(engine, ids)


def test_hooks_do_not_fire_for_an_abandoned_step(model: nn.Module, ids: torch.Tensor) -> None:
    fired: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    with engine_for(model) as engine:
        step_breaks(engine, ids, "backward of the sweep's last chunk")
        steps = engine.iter_step(ids)
        for _ in range(YIELDS):
            next(steps)
        steps.close()
        assert fired == []
        engine.step(ids)
        assert len(fired) == len(list(model.parameters()))


def test_a_complete_step_moves_the_generators_like_one_forward(
    engine: oomb.Engine, ids: torch.Tensor
) -> None:
    begin = torch.get_rng_state()
    engine.evaluate(ids)
    end = torch.get_rng_state()
    assert not torch.equal(begin, end)
    torch.set_rng_state(begin)
    engine.step(ids)
    assert torch.equal(torch.get_rng_state(), end)


def test_evaluate_that_raises_leaves_nothing(engine: oomb.Engine, ids: torch.Tensor) -> None:
    model = engine._model.whole
    before = picture(model)
    for kind, call in (("layer", 1), ("loss", 5)):
        with breaking(kind, model, call, Halt), pytest.raises(Halt):
            engine.evaluate(ids)
        assert changes(before, picture(model)) == []
    right_again(engine, ids)


@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
def test_experts_and_every_policy_survive(ids: torch.Tensor, policy: str) -> None:
    model = tiny_model("qwen3_moe", torch.float32).eval()
    with engine_for(model, activation_policy=policy) as engine:
        for yields in (2, 5):
            steps = engine.iter_step(ids)
            for _ in range(yields):
                next(steps)
            steps.close()
        right_again(engine, ids)


# -- memory ---------------------------------------------------------------------------------------


def _live(live: LiveBytes) -> dict[str, int]:
    gc.collect()
    return {name: size for name, size in live.current_by.items() if size}


@pytest.mark.parametrize(
    ("place", "policy"),
    [
        ("last chunk of the fill", "selective"),
        ("loss in the middle of the sweep", "keep"),
        ("backward of the sweep's last chunk", "selective"),
        ("backward of the sweep's last chunk", "layer"),
    ],
)
def test_memory_is_back_where_it_was(
    model: nn.Module, ids: torch.Tensor, place: str, policy: str
) -> None:
    with engine_for(model, activation_policy=policy) as engine, LiveBytes() as live:
        before = _live(live)
        kind, chunk = PLACES[place]
        with breaking(kind, model, chunk, Halt), suppress(Halt):
            engine.step(ids)
        assert live.peak_by["kv_pages"] > 0
        assert _live(live) == before


def test_memory_is_back_after_iter_step_is_closed(model: nn.Module, ids: torch.Tensor) -> None:
    with engine_for(model) as engine, LiveBytes() as live:
        before = _live(live)
        for yields in (CHUNKS, YIELDS):
            steps = engine.iter_step(ids)
            for _ in range(yields):
                state = next(steps)
            assert set(_live(live)) > set(before)
            steps.close()
            assert _live(live) == before, (state.phase, state.chunk)


def test_memory_does_not_grow_from_step_to_step(model: nn.Module, ids: torch.Tensor) -> None:
    with engine_for(model) as engine, LiveBytes() as live:
        engine.step(ids)
        model.zero_grad(set_to_none=True)
        after_one = _live(live)
        engine.step(ids)
        engine.evaluate(ids)
        model.zero_grad(set_to_none=True)
        assert _live(live) == after_one


# -- check_replay ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        (torch.float32, "keep"),
        (torch.float32, "selective"),
        (torch.float32, "layer"),
        (torch.bfloat16, "selective"),
    ],
)
def test_check_replay_passes_with_dropout(
    ids: torch.Tensor, dtype: torch.dtype, policy: str
) -> None:
    model = tiny_model("gpt2", dtype, resid_pdrop=0.1, embd_pdrop=0.1)
    with engine_for(model, check_replay=True, activation_policy=policy) as engine:
        engine.step(ids)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


class Restless(nn.Module):
    """In training, scales by a number that torch's generators do not know."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * random.uniform(0.5, 1.5) if self.training else hidden


def test_check_replay_finds_a_model_that_does_not_repeat(
    model: nn.Module, ids: torch.Tensor
) -> None:
    model.transformer.h[0].mlp = nn.Sequential(model.transformer.h[0].mlp, Restless())
    with engine_for(model, check_replay=True) as engine:
        before = picture(model)
        with pytest.raises(RuntimeError, match=r"check_replay: K of layer 1, chunk 1.*repeatable"):
            engine.step(ids)
        assert changes(before, _without_dtypes(picture(model), before)) == []
        right_again(engine, ids)


def test_check_replay_finds_weights_changed_between_fill_and_sweep(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.float32)
    with engine_for(model, check_replay=True) as engine:
        for state in (steps := engine.iter_step(ids)):
            if (state.phase, state.chunk) == ("sweep", 2):
                break
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(1.01)
        with pytest.raises(RuntimeError, match="check_replay: V of layer 0, chunk 1"):
            next(steps)
        assert all(p.grad is None for p in model.parameters())
