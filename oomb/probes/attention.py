"""One small forward, watched: which attention layers there are, and that each is plain."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from oomb.cache.pool import LayerShape
from oomb.hf import SINK, CausalLM, attend, without_traces
from oomb.probes.facts import AttentionLayer

PLAIN_KEYWORDS = {
    "sliding_window", "position_ids", "position_embeddings", "is_causal", "use_cache", "cache",
    "past_key_values", "cache_position", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", SINK,
}  # fmt: skip
"""Keywords that leave attention as it is; sliding windows are read from the mask itself.

A layer's sinks do change it, in the one way that the engine knows.
"""


WATCHED = "oomb_watched"
"""The implementation that a model has while it is watched: other threads' models never have it."""

_masks: ContextVar[dict[int, MaskNote]] = ContextVar("_masks")


class MaskNote(NamedTuple):
    """A mask that a model asked for: what it was given, and the function that says who is seen."""

    token: torch.Tensor  # kept, so that its id is not used again
    function: Callable


def _note_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: Callable,
    device: Any = "cpu",
    **kwargs: Any,
) -> torch.Tensor:
    """Note a mask's function and give a token for it.

    The token is a real mask, for models that add it to their scores themselves and are refused
    for that. In steps it would cost some models a host synchronisation per forward, so there the
    implementation is another, which has no masks.
    """
    token = torch.zeros((batch_size, 1, q_length, kv_length), device=device)
    _masks.get()[id(token)] = MaskNote(token, mask_function)
    return token


AttentionInterface.register(WATCHED, attend)
AttentionMaskInterface.register(WATCHED, _note_mask)


def watch_attention(model: CausalLM) -> tuple[list[AttentionLayer], type]:
    """Run a few tokens and note every attention call."""
    layers: list[AttentionLayer] = []
    masks: dict[int, MaskNote] = {}
    names = {module: name for name, module in model.whole.named_modules()}

    def handler(module, query, key, value, mask, scaling, dropout, keywords):
        name = names[module]
        if any(layer.module is module for layer in layers):
            raise ValueError(
                f"attention module {name} runs more than once per forward, which the engine's "
                "pages cannot tell apart"
            )
        _refuse_keywords(name, keywords)
        if mask is not None and id(mask) not in masks:
            raise ValueError(
                f"attention module {name} adds a mask or bias of its own to its scores, which the "
                "engine does not support"
            )
        if key.shape[-1] != value.shape[-1] or key.dtype != value.dtype:
            raise ValueError(
                f"attention module {name} has keys of {key.shape[-1]} x {key.dtype} and values of "
                f"{value.shape[-1]} x {value.dtype}; the engine's pages need both alike"
            )
        shape = LayerShape(heads=key.shape[1], dim=key.shape[3], dtype=key.dtype)
        function = masks[id(mask)].function if mask is not None else None
        window = _window(name, function, keywords.get("sliding_window"), model)
        heads = query.shape[1]
        _refuse_strange_sinks(name, keywords.get(SINK), heads)
        layers.append(
            AttentionLayer(module, name, shape, heads, float(scaling), window, float(dropout))
        )
        return query.transpose(1, 2)

    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    modules = list(model.whole.modules())
    with (
        without_traces(model.whole, training=True),  # attention tells its dropout in training only
        model.attention_by(modules, handler, WATCHED),
    ):
        noting = _masks.set(masks)
        try:
            output = model.hidden_states(ids, positions)
        finally:
            _masks.reset(noting)
    if not layers:
        raise ValueError(
            f"{type(model.whole).__name__} does not run its attention through transformers' "
            "AttentionInterface, so the engine cannot take part in it"
        )
    return layers, type(output)


def _refuse_keywords(name: str, keywords: dict[str, Any]) -> None:
    strange = [key for key, v in keywords.items() if key not in PLAIN_KEYWORDS and v is not None]
    if keywords.get("is_causal") is False:
        strange.append("is_causal=False")
    if strange:
        raise ValueError(
            f"attention module {name} asks for {', '.join(sorted(strange))}, which the engine "
            "does not support"
        )


def _refuse_strange_sinks(name: str, sinks: torch.Tensor | None, heads: int) -> None:
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(
            f"attention module {name} has sinks ({SINK}) of shape {list(sinks.shape)}; the engine "
            f"supports one per query head, [{heads}]"
        )


def _window(
    name: str, mask_function: Callable | None, keyword: int | None, model: CausalLM
) -> int | None:
    """The layer's sliding window: transformers' mask is the truth, keywords are only candidates."""
    if mask_function is None:
        return None  # no mask was built: plain causal, or the comparison with the whole run tells
    if keyword is not None and keyword < 1:
        raise ValueError(
            f"attention module {name} must have a sliding window of at least 1 token, got "
            f"{keyword}; set config.sliding_window=None to see all tokens"
        )
    candidates = {None, keyword, getattr(model.whole.config, "sliding_window", None)}
    for window in sorted(candidates, key=lambda w: (w is not None, w or 0)):
        if _mask_equals(mask_function, window):
            return window
    raise ValueError(
        f"attention module {name} has a mask that is neither causal nor a sliding window "
        "(chunked and bidirectional attention are not supported)"
    )


def _mask_equals(mask_function: Callable, window: int | None) -> bool:
    """Compare a mask with causal, or with a window, on sampled (query, key) pairs."""
    generator = torch.Generator().manual_seed(0)
    far = torch.randint(0, 1 << 20, (256,), generator=generator, device="cpu")
    near = torch.arange(96, device="cpu").repeat_interleave(96)
    queries = torch.cat([far, far, near])
    keys = torch.cat(
        [
            far[torch.randperm(256, generator=generator, device="cpu")],
            far,
            near.view(96, 96).T.flatten(),
        ]
    )
    for step in (window - 1, window, window + 1) if window else ():
        queries, keys = torch.cat([queries, far + step]), torch.cat([keys, far])
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    visible = torch.as_tensor(mask_function(zero, zero, queries, keys), device="cpu")
    expected = keys <= queries
    if window is not None:
        expected &= queries - keys < window
    return bool((visible == expected).all())
