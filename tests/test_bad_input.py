"""Wrong settings and arguments are refused before any work, with what was expected and came."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from helpers import relative_error, tiny_model

import oomb

VOCAB = 97
ROWS, TOKENS = 2, 20
CONFIG = {"chunk_size": 8, "page_size": 4, "attention_backend": "reference"}
ENTRIES = ("step", "iter_step", "evaluate")


@pytest.fixture(scope="module")
def engine() -> oomb.Engine:
    return oomb.Engine(tiny_model("qwen2", torch.float32), oomb.EngineConfig(**CONFIG))


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def padded(*lengths: int) -> torch.Tensor:
    """A mask with padding on the right."""
    return (torch.arange(TOKENS) < torch.tensor(lengths)[:, None]).long()


def refused(call: Callable[[], Any], error: type[Exception], words: list[str], model: Any) -> None:
    """The call raises with these words, in order, and neither runs nor changes the model."""
    runs: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: runs.append(type(module).__name__))
        for module in model.modules()
    ]
    generator = torch.get_rng_state()
    try:
        with pytest.raises(error) as caught:
            call()
    finally:
        for hook in hooks:
            hook.remove()
    pattern = ".*".join(re.escape(word) for word in words)
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)
    assert runs == []
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())


# -- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chunk_size", "page_size", "segment_pages"])
@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (0, ValueError, ["at least 1", "0"]),
        (-8, ValueError, ["at least 1", "-8"]),
        (True, TypeError, ["positive integer", "True"]),
        (False, TypeError, ["positive integer", "False"]),
        (8.0, TypeError, ["positive integer", "8.0", "float"]),
        (float("nan"), TypeError, ["positive integer", "nan"]),
        ("8", TypeError, ["positive integer", "'8'", "str"]),
        ([8], TypeError, ["positive integer", "[8]", "list"]),
        (Fraction(8), TypeError, ["positive integer", "Fraction(8, 1)"]),
        (np.float32(8), TypeError, ["positive integer", "float32"]),
    ],
)
def test_sizes_are_positive_integers(name: str, value: Any, error: type, words: list[str]) -> None:
    sizes = {"chunk_size": 64, "page_size": 8, name: value}
    with pytest.raises(error) as caught:
        oomb.EngineConfig(**sizes)
    assert re.search(".*".join(map(re.escape, [name, *words])), str(caught.value))


@pytest.mark.parametrize("name", ["chunk_size", "page_size"])
def test_sizes_cannot_be_left_out_with_none(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a positive integer, got None"):
        oomb.EngineConfig(**{name: None})


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor(8), np.True_])
def test_sizes_are_no_tensors(value: Any) -> None:
    with pytest.raises(TypeError, match="chunk_size must be a positive integer, got"):
        oomb.EngineConfig(chunk_size=value, page_size=1)


def test_any_kind_of_integer_is_a_size() -> None:
    config = oomb.EngineConfig(chunk_size=np.int32(16), page_size=np.int64(8))
    assert (type(config.chunk_size), type(config.page_size)) == (int, int)
    assert (config.chunk_size, config.page_size) == (16, 8)


@pytest.mark.parametrize(
    ("chunk", "page", "advice"),
    [
        (100, 16, "use chunk_size=96 or 112"),
        (8, 16, "use chunk_size=16, or a page_size that divides 8"),
        (17, 16, "16 or"),
    ],
)
def test_chunk_size_is_a_multiple_of_page_size(chunk: int, page: int, advice: str) -> None:
    pattern = f"multiple of page_size.*chunk_size={chunk}.*page_size={page}.*{advice}"
    with pytest.raises(ValueError, match=pattern):
        oomb.EngineConfig(chunk_size=chunk, page_size=page)


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("attention_backend", "flash", ["'auto'", "'library'", "'reference'", "'flash'"]),
        ("attention_backend", None, ["'auto'", "None"]),
        ("attention_backend", "Reference", ["'auto'", "'Reference'"]),
        ("activation_policy", "all", ["'keep'", "'selective'", "'layer'", "'all'"]),
        ("activation_policy", ["keep"], ["'keep'", "['keep']"]),
        ("fused_kernels", True, ["'auto'", "'off'", "True"]),
        ("grad_dtype", "float32", ["torch.float32", "'float32'"]),
        ("grad_dtype", torch.int32, ["torch.bfloat16", "torch.int32"]),
        ("grad_dtype", None, ["torch.bfloat16", "None"]),
        ("page_grad_dtype", torch.float8_e4m3fn, ["torch.bfloat16", "torch.float8_e4m3fn"]),
        ("page_grad_dtype", torch.complex64, ["torch.bfloat16", "torch.complex64"]),
    ],
)
def test_unknown_choices_are_listed(name: str, value: Any, choices: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        oomb.EngineConfig(**{name: value})
    assert re.search(".*".join(map(re.escape, [name, "one of", *choices])), str(caught.value))


@pytest.mark.parametrize(
    "name", ["deterministic", "check_replay", "restore_grads", "keep_fill_outputs"]
)
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_switches_are_booleans(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False, got {value!r}"):
        oomb.EngineConfig(**{name: value})


def test_recorder_has_on_event() -> None:
    with pytest.raises(TypeError, match=r"recorder.*on_event\(event\).*got list"):
        oomb.EngineConfig(recorder=[])


def test_settings_are_keyword_only_and_known() -> None:
    with pytest.raises(TypeError):
        oomb.EngineConfig(64, 8)
    with pytest.raises(TypeError, match="chunk_sizes"):
        oomb.EngineConfig(chunk_sizes=64)


def test_config_is_an_engine_config() -> None:
    with pytest.raises(TypeError, match=r"config must be an oomb.EngineConfig, got dict"):
        oomb.Engine(tiny_model("qwen2", torch.float32), {"chunk_size": 64})


# -- arguments of step, iter_step and evaluate ----------------------------------------------------

FULL = (ROWS, TOKENS)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "ids: list": ({"input_ids": [[1, 2]]}, TypeError, ["input_ids", "tensor", "list"]),
    "ids: array": ({"input_ids": np.ones(FULL, int)}, TypeError, ["input_ids", "ndarray"]),
    "ids: none": ({"input_ids": None}, TypeError, ["input_ids", "tensor", "NoneType"]),
    "ids: text": ({"input_ids": "hello"}, TypeError, ["input_ids", "tensor", "str"]),
    "ids: float": ({"input_ids": torch.ones(FULL)}, TypeError, ["input_ids", "integer", "float32"]),
    "ids: half": (
        {"input_ids": torch.ones(FULL, dtype=torch.bfloat16)},
        TypeError,
        ["input_ids", "integer", "bfloat16"],
    ),
    "ids: bool": (
        {"input_ids": torch.ones(FULL, dtype=torch.bool)},
        TypeError,
        ["input_ids", "integer", "bool"],
    ),
    "ids: 1-d": (
        {"input_ids": torch.ones(TOKENS, dtype=torch.long)},
        ValueError,
        ["input_ids", "[batch, tokens]", "[20]", "input_ids[None]"],
    ),
    "ids: 3-d": (
        {"input_ids": torch.ones((1, 2, 3), dtype=torch.long)},
        ValueError,
        ["input_ids", "[batch, tokens]", "[1, 2, 3]"],
    ),
    "ids: 0-d": ({"input_ids": torch.tensor(1)}, ValueError, ["input_ids", "[batch, tokens]"]),
    "ids: no tokens": (
        {"input_ids": torch.ones((2, 0), dtype=torch.long)},
        ValueError,
        ["input_ids", "at least one token", "[2, 0]"],
    ),
    "ids: no rows": (
        {"input_ids": torch.ones((0, 5), dtype=torch.long)},
        ValueError,
        ["input_ids", "at least one row", "[0, 5]"],
    ),
    "ids: meta": (
        {"input_ids": torch.ones(FULL, dtype=torch.long, device="meta")},
        ValueError,
        ["input_ids", "CPU", "model's device", "meta"],
    ),
    "ids: too large": (
        {"input_ids": torch.full(FULL, VOCAB)},
        ValueError,
        ["input_ids", "vocabulary", "0 to 96", "97"],
    ),
    "ids: negative": (
        {"input_ids": torch.full(FULL, -1)},
        ValueError,
        ["input_ids", "vocabulary", "0 to 96", "-1"],
    ),
    "ids: too large under padding": (
        {
            "input_ids": torch.full(FULL, VOCAB).masked_fill(padded(20, 9).bool(), 3),
            "attention_mask": padded(20, 9),
        },
        ValueError,
        ["input_ids", "vocabulary", "97"],
    ),
    "labels: list": ({"labels": [[1]]}, TypeError, ["labels", "tensor", "list"]),
    "labels: shape": (
        {"labels": torch.ones((ROWS, TOKENS - 1), dtype=torch.long)},
        ValueError,
        ["labels", "[2, 20]", "input_ids", "[2, 19]"],
    ),
    "labels: one row": (
        {"labels": torch.ones((1, TOKENS), dtype=torch.long)},
        ValueError,
        ["labels", "[2, 20]", "[1, 20]"],
    ),
    "labels: float": ({"labels": torch.ones(FULL)}, TypeError, ["labels", "integer", "float32"]),
    "labels: meta": (
        {"labels": torch.ones(FULL, dtype=torch.long, device="meta")},
        ValueError,
        ["labels", "CPU", "meta"],
    ),
    "labels: too large": (
        {"labels": torch.full(FULL, VOCAB)},
        ValueError,
        ["labels", "-100", "vocabulary", "0 to 96", "97"],
    ),
    "labels: other ignore index": (
        {"labels": torch.full(FULL, -1)},
        ValueError,
        ["labels", "-100", "vocabulary", "-1"],
    ),
    "labels: counted on padding": (
        {"labels": torch.ones(FULL, dtype=torch.long), "attention_mask": padded(20, 9)},
        ValueError,
        ["labels", "-100", "attention_mask is 0", "row 1", "labels[attention_mask == 0] = -100"],
    ),
    "mask: list": ({"attention_mask": [1, 1]}, TypeError, ["attention_mask", "tensor", "list"]),
    "mask: shape": (
        {"attention_mask": torch.ones((ROWS, TOKENS + 1))},
        ValueError,
        ["attention_mask", "[2, 20]", "[2, 21]"],
    ),
    "mask: 4-d": (
        {"attention_mask": torch.ones((ROWS, 1, TOKENS, TOKENS))},
        ValueError,
        ["attention_mask", "[2, 20]", "[2, 1, 20, 20]"],
    ),
    "mask: meta": (
        {"attention_mask": torch.ones(FULL, device="meta")},
        ValueError,
        ["attention_mask", "CPU", "meta"],
    ),
    "mask: left padding": (
        {"attention_mask": padded(20, 9).flip(1)},
        ValueError,
        ["attention_mask", "right", "left padding", "padding_side='right'"],
    ),
    "mask: hole": (
        {"attention_mask": torch.ones(FULL).index_fill(1, torch.tensor([7]), 0)},
        ValueError,
        ["attention_mask", "a 0 before a 1"],
    ),
    "mask: document numbers": (
        {"attention_mask": torch.ones(FULL).index_fill(1, torch.tensor([7]), 2)},
        ValueError,
        ["attention_mask", "0 and 1"],
    ),
    "mask: additive": (
        {"attention_mask": torch.zeros(FULL).index_fill(1, torch.tensor([19]), float("-inf"))},
        ValueError,
        ["attention_mask", "0 and 1"],
    ),
    "mask: nan": (
        {"attention_mask": torch.full(FULL, float("nan"))},
        ValueError,
        ["attention_mask", "0 and 1"],
    ),
    "mask: nothing kept": (
        {"attention_mask": torch.zeros(FULL)},
        ValueError,
        ["attention_mask", "at least one token", "only 0"],
    ),
    "positions: list": ({"position_ids": [0]}, TypeError, ["position_ids", "tensor", "list"]),
    "positions: float": (
        {"position_ids": torch.arange(20.0).expand(FULL)},
        TypeError,
        ["position_ids", "integer", "float32"],
    ),
    "positions: 1-d": (
        {"position_ids": torch.arange(TOKENS)},
        ValueError,
        ["position_ids", "[2, 20]", "[1, 20]", "[20]"],
    ),
    "positions: three-part": (
        {"position_ids": torch.arange(TOKENS).expand(3, ROWS, TOKENS)},
        ValueError,
        ["position_ids", "[2, 20]", "[3, 2, 20]"],
    ),
    "positions: negative": (
        {"position_ids": torch.arange(-1, TOKENS - 1).expand(FULL)},
        ValueError,
        ["position_ids", "at least 0", "-1"],
    ),
    "positions: meta": (
        {"position_ids": torch.ones(FULL, dtype=torch.long, device="meta")},
        ValueError,
        ["position_ids", "CPU", "meta"],
    ),
    "documents: list": ({"document_ids": [0]}, TypeError, ["document_ids", "tensor", "list"]),
    "documents: float": (
        {"document_ids": torch.ones(FULL)},
        TypeError,
        ["document_ids", "integer", "float32"],
    ),
    "documents: one row": (
        {"document_ids": torch.ones((1, TOKENS), dtype=torch.long)},
        ValueError,
        ["document_ids", "[2, 20]", "[1, 20]"],
    ),
    "documents: meta": (
        {"document_ids": torch.ones(FULL, dtype=torch.long, device="meta")},
        ValueError,
        ["document_ids", "CPU", "meta"],
    ),
    "documents: in pieces": (
        {"document_ids": torch.tensor([[0] * TOKENS, [0] * 5 + [1] * 5 + [0] * 10])},
        ValueError,
        ["document_ids", "one run", "several pieces", "row 1", "its own id"],
    ),
    "items: 0": ({"num_items_in_batch": 0}, ValueError, ["num_items_in_batch", "positive", "0"]),
    "items: negative": (
        {"num_items_in_batch": -3},
        ValueError,
        ["num_items_in_batch", "positive", "-3"],
    ),
    "items: nan": (
        {"num_items_in_batch": float("nan")},
        ValueError,
        ["num_items_in_batch", "positive", "nan"],
    ),
    "items: text": (
        {"num_items_in_batch": "38"},
        ValueError,
        ["num_items_in_batch", "number", "'38'"],
    ),
    "items: bool": ({"num_items_in_batch": True}, ValueError, ["num_items_in_batch", "True"]),
    "items: two": (
        {"num_items_in_batch": torch.tensor([3, 4])},
        ValueError,
        ["num_items_in_batch", "0-d tensor", "[3, 4]"],
    ),
    "items: infinite": (
        {"num_items_in_batch": float("inf")},
        ValueError,
        ["num_items_in_batch", "positive", "inf"],
    ),
    "items: complex": ({"num_items_in_batch": 2j}, ValueError, ["num_items_in_batch", "2j"]),
    "items: meta": (
        {"num_items_in_batch": torch.tensor(5.0, device="meta")},
        ValueError,
        ["num_items_in_batch", "0-d tensor", "meta"],
    ),
    "items: zero tensor": (
        {"num_items_in_batch": torch.tensor(0)},
        ValueError,
        ["num_items_in_batch", "positive"],
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(
    engine: oomb.Engine, ids: torch.Tensor, entry: str, case: str
) -> None:
    arguments, error, words = WRONG[case]
    call = getattr(engine, entry)
    refused(lambda: call(**{"input_ids": ids, **arguments}), error, words, engine._model.whole)


def test_the_engine_works_after_refusals(engine: oomb.Engine, ids: torch.Tensor) -> None:
    model = engine._model.whole
    for arguments, _, _ in WRONG.values():
        with pytest.raises((TypeError, ValueError)):
            engine.step(**{"input_ids": ids, **arguments})
    expected = model(input_ids=ids, labels=ids).loss
    assert relative_error(engine.evaluate(ids), expected.detach()) < 1e-6


@pytest.mark.parametrize(
    "arguments",
    [
        {"labels": torch.full(FULL, -100).index_fill(1, torch.tensor([3]), 5)},
        {"attention_mask": padded(20, 9).bool()},
        {"attention_mask": padded(20, 9).double()},
        {"attention_mask": padded(20, 0)},
        {"position_ids": torch.arange(TOKENS)[None]},
        {"document_ids": torch.tensor([[7] * 5 + [3] * 15] * 2, dtype=torch.int16)},
        {"num_items_in_batch": torch.tensor([38.0])},
        {"num_items_in_batch": 0.5},
        {"num_items_in_batch": np.int64(38)},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_unusual_but_right_arguments_are_taken(
    engine: oomb.Engine, ids: torch.Tensor, arguments: dict[str, Any]
) -> None:
    assert torch.isfinite(engine.evaluate(ids, **arguments))


def test_column_zero_may_be_labelled_under_a_mask_of_one_token(
    engine: oomb.Engine, ids: torch.Tensor
) -> None:
    labels = torch.where(padded(20, 1).bool(), ids, -100)
    loss = engine.evaluate(ids, labels=labels, attention_mask=padded(20, 1))
    assert relative_error(loss, engine.evaluate(ids[:1])) < 1e-6


BYTES = 256


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int32], ids=lambda dtype: str(dtype)[6:]
)
def test_every_integer_dtype_means_the_same(dtype: torch.dtype) -> None:
    # In 8 bits without sign -100 is 156, and from 255 to 0 is one step forward.
    model = tiny_model("llama", torch.float32)
    model.resize_token_embeddings(BYTES)
    engine = oomb.Engine(model, oomb.EngineConfig(**{**CONFIG, "chunk_size": 64}))
    ids = torch.randint(0, BYTES, (1, 300))
    ids[0, ::5] = 156
    labels = torch.where(torch.rand(ids.shape) < 0.5, ids, 7)
    positions = (torch.arange(300) % 256)[None]
    for arguments in ({}, {"labels": labels}, {"position_ids": positions}):
        wide = engine.step(ids, **arguments)
        narrow = engine.step(ids.to(dtype), **{n: t.to(dtype) for n, t in arguments.items()})
        assert narrow.num_label_tokens == wide.num_label_tokens
        assert torch.equal(narrow.loss, wide.loss)


@pytest.mark.parametrize("entry", ENTRIES)
def test_labels_of_8_bits_are_not_ignored(
    engine: oomb.Engine, ids: torch.Tensor, entry: str
) -> None:
    labels = torch.full(FULL, 156, dtype=torch.uint8)
    call = getattr(engine, entry)
    words = ["labels", "vocabulary", "0 to 96", "156"]
    refused(lambda: call(ids, labels=labels), ValueError, words, engine._model.whole)


# -- the surroundings of a step -------------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES)
def test_autocast_is_refused(engine: oomb.Engine, ids: torch.Tensor, entry: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        call = getattr(engine, entry)
        refused(lambda: call(ids), RuntimeError, ["autocast", "leave"], engine._model.whole)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_closed_engine_is_refused(ids: torch.Tensor, entry: str) -> None:
    model = tiny_model("qwen2", torch.float32)
    engine = oomb.Engine(model, oomb.EngineConfig(**CONFIG))
    engine.close()
    engine.close()
    call = getattr(engine, entry)
    refused(lambda: call(ids), RuntimeError, ["closed", "oomb.Engine"], model)


@pytest.mark.parametrize("entry", ["step", "iter_step"])
def test_inference_mode_is_refused(engine: oomb.Engine, ids: torch.Tensor, entry: str) -> None:
    with torch.inference_mode():
        call = getattr(engine, entry)
        words = ["gradients", "inference_mode", "engine.evaluate"]
        refused(lambda: call(ids), RuntimeError, words, engine._model.whole)
        assert torch.isfinite(engine.evaluate(ids))


def test_a_generator_made_before_close_is_refused(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.float32)
    with oomb.Engine(model, oomb.EngineConfig(**CONFIG)) as engine:
        steps = engine.iter_step(ids)
        engine.close()
        refused(lambda: next(steps, None), RuntimeError, ["closed"], model)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_model_changed_after_attaching_is_refused(ids: torch.Tensor, entry: str) -> None:
    model = tiny_model("qwen2", torch.float32)
    engine = oomb.Engine(model, oomb.EngineConfig(**CONFIG))
    model.double()
    call = getattr(engine, entry)
    refused(lambda: call(ids), RuntimeError, ["dtype or device", "oomb.Engine"], model)


def test_the_default_device_does_not_matter(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.float32)
    documents = torch.tensor([[0] * 5 + [1] * 15, [0] * 20])
    expected = oomb.Engine(model, oomb.EngineConfig(**CONFIG)).evaluate(ids, document_ids=documents)
    with torch.device("meta"):
        engine = oomb.Engine(model, oomb.EngineConfig(**CONFIG))
        assert torch.equal(engine.step(ids, document_ids=documents).loss, expected)


@pytest.mark.parametrize("stop", [1, 4], ids=["in the fill", "in the sweep"])
@pytest.mark.parametrize("entry", [*ENTRIES, "close"])
def test_a_busy_engine_is_refused(
    engine: oomb.Engine, ids: torch.Tensor, entry: str, stop: int
) -> None:
    steps = engine.iter_step(ids)
    try:
        for _ in range(stop):
            next(steps)
        arguments = () if entry == "close" else (ids,)
        with pytest.raises(RuntimeError, match=r"iter_step.*under way.*generator first"):
            getattr(engine, entry)(*arguments)
    finally:
        steps.close()
    assert torch.isfinite(engine.evaluate(ids))


def test_a_generator_that_starts_late_is_refused(engine: oomb.Engine, ids: torch.Tensor) -> None:
    first, second = engine.iter_step(ids), engine.iter_step(ids)
    try:
        next(first)
        with pytest.raises(RuntimeError, match="under way"):
            next(second)
        assert len(list(first)) == 4
    finally:
        first.close()
        engine._model.whole.zero_grad(set_to_none=True)


@pytest.mark.parametrize("entry", ENTRIES)
def test_attention_dropout_is_refused_in_training(ids: torch.Tensor, entry: str) -> None:
    model = tiny_model("qwen2", torch.float32, attention_dropout=0.25)
    engine = oomb.Engine(model, oomb.EngineConfig(**CONFIG))
    words = ["attention dropout", "0", "0.25", "layers.0.self_attn", "attention_dropout=0"]
    refused(lambda: getattr(engine, entry)(ids), ValueError, words, model)
    model.eval()
    expected = model(input_ids=ids, labels=ids).loss.detach()
    assert relative_error(engine.evaluate(ids), expected) < 1e-6


@pytest.mark.parametrize("entry", ENTRIES)
def test_attention_dropout_set_after_attaching_is_refused(ids: torch.Tensor, entry: str) -> None:
    model = tiny_model("qwen2", torch.float32)
    engine = oomb.Engine(model, oomb.EngineConfig(**CONFIG))
    model.model.layers[1].self_attn.attention_dropout = 0.25
    with pytest.raises(ValueError, match=r"attention dropout.*0\.25.*layers\.1\.self_attn"):
        list(getattr(engine, entry)(ids))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_attention_dropout_of_one_layer_in_training_is_refused(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.float32).eval()
    model.model.layers[1].self_attn.attention_dropout = 0.25
    engine = oomb.Engine(model, oomb.EngineConfig(**CONFIG))
    assert torch.isfinite(engine.evaluate(ids))
    model.model.layers[1].train()
    words = ["attention dropout", "0.25", "layers.1.self_attn"]
    refused(lambda: engine.step(ids), ValueError, words, model)


def test_all_parameters_frozen_is_refused(ids: torch.Tensor) -> None:
    model = tiny_model("qwen2", torch.float32).requires_grad_(False)
    engine = oomb.Engine(model, oomb.EngineConfig(**CONFIG))
    words = ["requires_grad=True", "none", "engine.evaluate"]
    refused(lambda: engine.step(ids), ValueError, words, model)
    assert torch.isfinite(engine.evaluate(ids))


# -- learned position tables ----------------------------------------------------------------------

POSITIONS = 16


@pytest.fixture(scope="module")
def gpt2() -> oomb.Engine:
    model = tiny_model("gpt2", torch.float32, n_positions=POSITIONS)
    return oomb.Engine(model, oomb.EngineConfig(**CONFIG))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"attention_mask": padded(POSITIONS + 1, 4)},
        {"document_ids": torch.tensor([[0] * 3 + [1] * 17, [0] * 10 + [1] * 10])},
        {"position_ids": torch.arange(1, TOKENS + 1)[None]},
        {"position_ids": torch.tensor([[*range(3), *range(17)]])},
    ],
    ids=["whole row", "unpadded row", "one document", "shifted positions", "restarting positions"],
)
def test_documents_fit_the_position_table(
    gpt2: oomb.Engine, ids: torch.Tensor, entry: str, arguments: dict[str, Any]
) -> None:
    words = ["input_ids", "16 learned positions", "document of", "tokens"]
    call = getattr(gpt2, entry)
    refused(lambda: call(ids, **arguments), ValueError, words, gpt2._model.whole)


@pytest.mark.parametrize(
    "arguments",
    [
        {"attention_mask": padded(POSITIONS, 4)},
        {"document_ids": torch.tensor([[0] * 4 + [1] * 16, [0] * 10 + [1] * 10])},
        {"position_ids": torch.tensor([[*range(4), *range(16)]])},
    ],
    ids=["padding", "documents", "positions"],
)
def test_documents_as_long_as_the_position_table_are_taken(
    gpt2: oomb.Engine, ids: torch.Tensor, arguments: dict[str, Any]
) -> None:
    assert torch.isfinite(gpt2.evaluate(ids, **arguments))
