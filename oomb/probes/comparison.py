"""Runs that must agree: with one token changed, and whole against in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from oomb.hf import CausalLM, without_traces
from oomb.probes.facts import ModelFacts

Run = tuple[torch.Tensor, torch.Tensor]
RunByEngine = Callable[..., Run]

PROBE_TOKENS = 100


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
