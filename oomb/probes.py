"""What the engine asks a model before it trusts it.

Chunk recurrence is exact only if attention is the one way in which tokens see each other, and only
if that attention is plain: causal or a sliding window, no bias, no cap. A model that is anything
else is refused here by name, before any work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from oomb.cache.pool import LayerShape
from oomb.hf import NAME, CausalLM
from oomb.moe import RouterSettings

Run = tuple[torch.Tensor, torch.Tensor]
RunByEngine = Callable[..., Run]

PROBE_TOKENS = 100
PLAIN_KEYWORDS = {
    "sliding_window", "position_ids", "position_embeddings", "is_causal", "use_cache", "cache",
    "past_key_values", "cache_position", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict",
}  # fmt: skip
"""Keywords that leave attention as it is; sliding windows are read from the mask itself."""

PLAIN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer, as a probing forward saw it.

    Attributes:
        module: the attention module.
        name: its path in the model.
        shape: what its pages hold.
        scale: factor on q . k.
        window: sliding window in tokens, or None.
        dropout: probability with which it drops attention weights in training.
    """

    module: nn.Module
    name: str
    shape: LayerShape
    scale: float
    window: int | None
    dropout: float


@dataclass(frozen=True)
class ModelFacts:
    """All that the engine knows about a model.

    Attributes:
        layers: attention layers in order of their first call; the order numbers them.
        output_class: what the base model returns.
        max_positions: rows of a learned position table, or None.
        experts: whether tokens choose experts.
    """

    layers: list[AttentionLayer]
    output_class: type
    max_positions: int | None
    experts: bool


def probe_model(whole: PreTrainedModel) -> tuple[CausalLM, ModelFacts]:
    """Look at a model's configuration and at small forwards.

    Raises:
        ValueError: chunk recurrence would not be exact, or is not built; the message names why.
    """
    _refuse_by_config(whole)
    model = CausalLM(whole, _find_base(whole))
    layers, output_class = _watch_attention(model)
    config = whole.config.get_text_config()
    experts = any(getattr(config, key, None) for key in ("num_experts", "num_local_experts"))
    router_settings(model)  # refuses a model whose settings cannot be read
    facts = ModelFacts(layers, output_class, _learned_positions(model), experts)
    return model, facts


def _find_base(whole: PreTrainedModel) -> nn.Module:
    """The module that a model's own forward asks for hidden states.

    Usually `base_model`; some families call the decoder inside it.
    """
    called: list[nn.Module] = []
    handles = [
        module.register_forward_pre_hook(lambda module, _: called.append(module))
        for module in (whole.base_model, whole.get_decoder())
        if module is not whole
    ]
    ids = torch.zeros((1, 1), dtype=torch.int64, device=next(whole.parameters()).device)
    try:
        with without_traces(whole, training=False):
            whole(input_ids=ids, use_cache=False, return_dict=True)
    finally:
        for handle in handles:
            handle.remove()
    if not called:
        raise ValueError(
            f"model must be a causal language model with a head over a base model, but "
            f"{type(whole).__name__}.forward calls no base model; load it with "
            "AutoModelForCausalLM"
        )
    return called[0]


def _refuse_by_config(whole: PreTrainedModel) -> None:
    name = type(whole).__name__
    if whole.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{name} trains on its own loss {whole.loss_function.__name__}; the engine "
            "computes transformers' ForCausalLMLoss only"
        )
    config = whole.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ()) - PLAIN_LAYER_TYPES
    if types:
        raise ValueError(
            f"{name} has layers of type {', '.join(sorted(types))}; the engine supports "
            "full_attention and sliding_attention layers only"
        )
    if getattr(config, "layerdrop", 0):
        raise ValueError(
            f"{name} leaves layers out at random in training (layerdrop={config.layerdrop}); set "
            "config.layerdrop=0"
        )
    for path, module in whole.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Conv1d) or any(word in kind for word in ("Mamba", "SSM", "Rwkv")):
            raise ValueError(
                f"{name} carries state between tokens outside of attention ({path}, {kind}); "
                "hybrid state-space models are not supported"
            )
        rope = getattr(module, "rope_type", None)
        for rope_type in rope.values() if isinstance(rope, dict) else [rope]:
            if isinstance(rope_type, str) and any(w in rope_type for w in LENGTH_DEPENDENT_ROPE):
                raise ValueError(
                    f"{name} uses RoPE of type '{rope_type}', whose angles depend on the length "
                    "of each call; use a model with a fixed RoPE (default, linear, llama3, yarn)"
                )


@contextmanager
def _mask_functions_visible(seen: dict[int, Callable]):
    """Register a mask builder that only notes the mask function and returns a token for it.

    Registered for good it would cost a host synchronisation per forward on some models.
    """
    tokens = []

    def note(
        batch_size: int,
        q_length: int,
        kv_length: int,
        *args: Any,
        mask_function: Callable,
        device: Any = "cpu",
        **kwargs: Any,
    ) -> torch.Tensor:
        # a real mask, for models that add it to their scores themselves and are refused for that
        token = torch.zeros((batch_size, 1, q_length, kv_length), device=device)
        tokens.append(token)  # keeps its id from being used again
        seen[id(token)] = mask_function
        return token

    AttentionMaskInterface.register(NAME, note)
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(NAME, None)


def _watch_attention(model: CausalLM) -> tuple[list[AttentionLayer], type]:
    """Run a few tokens and note every attention call."""
    layers: list[AttentionLayer] = []
    masks: dict[int, Callable] = {}
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
        window = _window(name, masks.get(id(mask)), keywords.get("sliding_window"), model)
        layers.append(AttentionLayer(module, name, shape, float(scaling), window, float(dropout)))
        return query.transpose(1, 2)

    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    modules = list(model.whole.modules())
    with (
        without_traces(model.whole, training=True),  # attention tells its dropout in training only
        model.attention_by(modules, handler),
        _mask_functions_visible(masks),
    ):
        output = model.hidden_states(ids, positions)
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


def router_settings(model: CausalLM) -> RouterSettings | None:
    """Settings of the load-balancing loss, if the model adds it to its loss."""
    whole = model.whole
    if not getattr(whole.config, "output_router_logits", False):
        return None
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    missing = [name for name in names if not hasattr(whole, name)]
    if missing:
        raise ValueError(
            f"{type(whole).__name__} adds a router loss but has no {', '.join(missing)}; set "
            "config.output_router_logits=False to train without it"
        )
    return RouterSettings(*(getattr(whole, name) for name in names))


def _learned_positions(model: CausalLM) -> int | None:
    """Rows of a learned position table: an embedding beside the token embedding."""
    tokens = model.whole.get_input_embeddings()
    for name, module in model.base.named_modules():
        is_table = isinstance(module, nn.Embedding) and module is not tokens
        if is_table and any(word in name for word in ("wpe", "position")):
            return module.num_embeddings - getattr(module, "offset", 0)
    return None


def _probe_tokens(model: CausalLM, facts: ModelFacts) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token ids and their positions, each [1, n]."""
    tokens = min(PROBE_TOKENS, facts.max_positions or PROBE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (1, tokens), generator=generator, device="cpu")
    return ids.to(model.device), torch.arange(tokens, device=model.device)[None]


def refuse_other_channels(model: CausalLM, facts: ModelFacts) -> None:
    """With attention cut off, a token's output must depend on that token and its position alone.

    Unlike a comparison of runs this does not drown in rounding: tokens computed at the same place
    of the same shape have the same bits, whatever stands beside them.

    Args:
        model: the model.
        facts: what the probe found.

    Raises:
        ValueError: a token's output depends on another token, or on where the call begins.
    """
    ids, positions = _probe_tokens(model, facts)
    middle = ids.shape[1] // 2
    other = ids.clone()
    other[0, middle] = (ids[0, middle] + 1) % model.vocab_size

    def own_token_only(module, query, *rest):
        return query.transpose(1, 2)

    def run(ids: torch.Tensor, at: slice) -> torch.Tensor:
        return model.hidden_states(ids[:, at], positions[:, at]).last_hidden_state[0].double()

    with (
        without_traces(model.whole, training=False),
        model.attention_by([layer.module for layer in facts.layers], own_token_only),
    ):
        whole, changed = run(ids, slice(None)), run(other, slice(None))
        halves = torch.cat([run(ids, slice(0, middle)), run(ids, slice(middle, None))])
    sizes = _sizes(whole)
    leak = (changed - whole).norm(dim=-1) / sizes
    leak[middle] = 0.0
    split = (halves - whole).norm(dim=-1) / sizes
    usual = _rounding(model.whole).usual
    # Experts are batched by what tokens choose, so a token's rounding may depend on the others.
    allowed_leak = usual if facts.experts else 0.0
    for difference, allowed, cause in (
        (leak.max(), allowed_leak, "another token changes"),
        (split.median() if facts.experts else split.max(), usual / 4, "a call begins elsewhere"),
    ):
        if not difference <= allowed:
            raise ValueError(
                f"{type(model.whole).__name__} changes a token's output by {float(difference):.1e} "
                f"when {cause}, with attention cut off (at most {allowed:.0e} expected): its "
                "tokens see each other in some way beside attention, so chunk recurrence would "
                "not be exact"
            )


def compare_with_whole_run(model: CausalLM, facts: ModelFacts, run: RunByEngine) -> None:
    """Run random tokens whole, by the engine in one chunk, and in small chunks.

    One chunk differs from the model's own run only if attention is not what the engine computes,
    or by rounding; small chunks differ from one chunk only if tokens see each other in some other
    way than through attention, or by rounding. So the first difference, once it is small enough to
    be rounding, tells how large the second may be.

    Args:
        model: the model.
        facts: what the probe found.
        run: run(ids [1, n], in_chunks=...) -> hidden states [1, n, hidden] and loss.

    Raises:
        ValueError: the runs disagree.
    """
    ids, positions = _probe_tokens(model, facts)
    tokens = ids.shape[1]
    with without_traces(model.whole, training=False):
        whole = (
            model.hidden_states(ids, positions).last_hidden_state,
            model.whole(input_ids=ids, labels=ids, use_cache=False, return_dict=True).loss,
        )
        one_chunk, chunks = run(ids, in_chunks=False), run(ids, in_chunks=True)
    rounding = _rounding(model.whole)
    own = _difference(one_chunk, whole, facts.experts)
    if not own <= rounding.most:
        raise ValueError(
            f"{type(model.whole).__name__} gives other results with the engine's attention than "
            f"with its own on {tokens} random tokens (relative difference {own:.1e}, at most "
            f"{rounding.most:.0e} expected): its attention is not plain causal attention"
        )
    between = _difference(chunks, one_chunk, facts.experts)
    allowed = max(4 * own, rounding.usual)
    if not between <= allowed:
        raise ValueError(
            f"{type(model.whole).__name__} gives other results in chunks than whole on {tokens} "
            f"random tokens (relative difference {between:.1e}, at most {allowed:.0e} expected): "
            "its tokens see each other in some way beside causal attention, so chunk recurrence "
            "would not be exact"
        )


def _sizes(hidden: torch.Tensor) -> torch.Tensor:
    """Norm of each token's hidden state, at least a thousandth of the largest.

    A padding token's embedding starts at zero, and its hidden state may stay there.
    """
    norms = hidden.norm(dim=-1)
    return norms.clamp_min(1e-3 * float(norms.max()))


def _difference(a: Run, b: Run, experts: bool) -> float:
    """Relative difference of two runs: of their hidden states, or of their losses if larger."""
    errors = (a[0].double() - b[0].double()).norm(dim=-1)
    sizes = _sizes(b[0].double())
    if experts:  # one chosen by a hair may flip with rounding, so some tokens may differ
        hidden = (errors / sizes).median()
    else:
        hidden = errors.norm() / sizes.norm()
    loss = (a[1].double() - b[1].double()).abs() / b[1].double().abs()
    return float(torch.maximum(hidden, loss))


@dataclass(frozen=True)
class _Rounding:
    """Relative differences of hidden states that rounding causes: usually, and at the very most."""

    usual: float
    most: float


def _rounding(model: nn.Module) -> _Rounding:
    bits = min(_bits(p.dtype) for p in model.parameters() if p.is_floating_point())
    if bits == 64:  # transformers computes parts of an fp64 model in fp32
        return _Rounding(usual=1e-6, most=1e-5)
    if bits == 32 and torch.get_float32_matmul_precision() == "highest":
        return _Rounding(usual=1e-5, most=1e-3)
    if bits == 32:  # matrix products in TF32
        return _Rounding(usual=1e-2, most=2e-2)
    return _Rounding(usual=8e-2, most=1.5e-1)  # 28 layers of bf16 were seen to reach 5e-2


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


@contextmanager
def without_traces(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run a model without gradients, in training or evaluation mode, and leave it as it was.

    Every module's mode comes back, and so do the random generators.
    """
    device = next(model.parameters()).device
    before = {module: module.training for module in model.modules()}
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        model.train(training)
        try:
            yield
        finally:
            for module, was in before.items():
                module.training = was
