"""Does a step at full size agree with transformers' own? `python -m oomb.bench.agreement`.

Random weights in the shapes of a 7-billion-parameter Qwen2, bf16, one sequence. The ordinary run is
transformers with layer checkpointing and SDPA; ours is one engine step. Every parameter's gradient
is compared, and time and peak memory of both are printed side by side.

How closely two bf16 runs can agree at all is measured too: by the ordinary run with another
attention kernel, and with --exact by the error of each against the ordinary run in fp32. A row
agrees if gradient norms differ by less than 0.5 % and no parameter's cosine is below 0.999, or
below what the two ordinary kernels reach with each other where that is less.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

import oomb
from oomb.bench.machine import machine_facts
from oomb.bench.models import QWEN2_7B, make_model
from oomb.bench.timing import peak_gib, reset_peak, timed

DEVICE = torch.device("cuda")
FACTS = ("date", "gpu", "torch", "transformers", "python")


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison, print a row per length, and write them as JSON; 1 if one disagrees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--policy", default="selective")
    parser.add_argument("--segment-pages", type=int)
    parser.add_argument("--exact", action="store_true", help="compare both with fp32 too")
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed, torch.cuda.is_available() is False")
    model = _model(options.layers)
    config = oomb.EngineConfig(
        chunk_size=options.chunk,
        activation_policy=options.policy,
        segment_pages=options.segment_pages,
    )
    rows = [compare(model, length, config, exact=options.exact) for length in options.lengths]
    if options.out:
        facts = machine_facts(DEVICE)
        machine = {name: facts[name] for name in FACTS}
        report = {**machine, "command": _command(options), "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row.get("agrees", True) for row in rows) else 1


def _command(options: argparse.Namespace) -> str:
    """The command that was run, less where its output went."""
    words = ["python -m oomb.bench.agreement"]
    for name, value in vars(options).items():
        if name == "out" or value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return " ".join(words)


def compare(
    model: torch.nn.Module, length: int, config: oomb.EngineConfig, *, exact: bool
) -> dict[str, Any]:
    """One length: every run, every parameter's gradient, time and memory."""
    ids = torch.randint(0, model.config.vocab_size, (1, length), device="cuda")
    truth = _exact_gradients(model, ids) if exact else None
    try:
        ordinary = _measure(model, lambda: _ordinary_run(model, ids, SDPBackend.CUDNN_ATTENTION))
        expected = _take_gradients(model)
        _ordinary_run(model, ids, SDPBackend.FLASH_ATTENTION)
        other_kernel = _take_gradients(model)
    except torch.OutOfMemoryError:
        ordinary = expected = other_kernel = None
    with oomb.Engine(model, config) as engine:
        ours = _measure(model, lambda: engine.step(ids).loss)
        backend, grads = engine.attention_backend, _take_gradients(model)
    row: dict[str, Any] = {
        "tokens": length,
        "backend": backend,
        "chunk": config.chunk_size,
        "page": config.page_size,
        "segment_pages": config.segment_pages,
        "policy": config.activation_policy,
        "loss": ours["loss"],
        "grad_norm": _norm(grads),
        "tokens_per_s": length / ours["seconds"],
        "peak_gib": ours["peak_gib"],
        "ordinary": "out of memory",
    }
    if ordinary is not None:
        row["ordinary"] = {
            "loss": ordinary["loss"],
            "grad_norm": _norm(expected),
            "tokens_per_s": length / ordinary["seconds"],
            "peak_gib": ordinary["peak_gib"],
        }
        row |= _agreement(grads, expected, other_kernel)
    if truth is not None and expected is not None:
        row |= _errors(truth, grads, expected)
    print(json.dumps(row, indent=1), flush=True)
    return row


def _agreement(
    ours: dict[str, torch.Tensor],
    ordinary: dict[str, torch.Tensor],
    other_kernel: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """Cosines with the ordinary run, beside those of the ordinary run with another kernel."""
    cosines = {name: _cosine(ours[name], ordinary[name]) for name in ours}
    floor = {name: _cosine(other_kernel[name], ordinary[name]) for name in ours}
    worst = sorted(cosines, key=cosines.__getitem__)[:5]
    norms_agree = abs(_norm(ours) / _norm(ordinary) - 1) < 0.005
    return {
        "agrees": norms_agree and min(cosines.values()) >= min(0.999, *floor.values()),
        "parameters": len(cosines),
        "worst_cosine": min(cosines.values()),
        "worst_cosine_of_two_ordinary_kernels": min(floor.values()),
        "below_0.999": sum(cosine < 0.999 for cosine in cosines.values()),
        "below_0.999_of_two_ordinary_kernels": sum(cosine < 0.999 for cosine in floor.values()),
        "worst": {name: [cosines[name], floor[name]] for name in worst},
    }


def _errors(
    truth: dict[str, torch.Tensor],
    ours: dict[str, torch.Tensor],
    ordinary: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """Relative errors of both runs against fp32, in all and where ours is worst beside theirs."""

    def error(grads: dict[str, torch.Tensor], name: str) -> float:
        exact = truth[name].float()
        return float((grads[name].float() - exact).norm() / exact.norm())

    errors = {name: (error(ours, name), error(ordinary, name)) for name in truth}
    ratios = {name: a / b for name, (a, b) in errors.items()}
    worst = sorted(ratios, key=ratios.__getitem__, reverse=True)[:5]
    by_error = sorted(errors, key=lambda name: errors[name][0], reverse=True)[:5]
    norms = {name: float(truth[name].norm()) for name in truth}

    def total(side: int) -> float:
        squares = sum((errors[name][side] * norms[name]) ** 2 for name in truth)
        return (squares / sum(norm**2 for norm in norms.values())) ** 0.5

    return {
        "error": total(0),
        "error_ordinary": total(1),
        "largest_error_ratio": {name: [*errors[name], ratios[name]] for name in worst},
        "largest_errors": {name: list(errors[name]) for name in by_error},
    }


def _exact_gradients(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The ordinary run in fp32, with attention written out: no fused kernel takes fp32 GQA."""
    twin = copy.deepcopy(model).float()
    _ordinary_run(twin, ids, SDPBackend.MATH)
    return _take_gradients(twin)


def _model(layers: int) -> PreTrainedModel:
    model = make_model(QWEN2_7B, layers, device=DEVICE, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    return model


def _ordinary_run(model: torch.nn.Module, ids: torch.Tensor, kernel: SDPBackend) -> torch.Tensor:
    with sdpa_kernel(kernel):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return loss.detach()


def _measure(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Once to warm up, once to measure; gradients of the second are left in place."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        others = torch.cuda.memory_allocated() - sum(p.nbytes for p in model.parameters())
        reset_peak(DEVICE)
        loss, seconds = timed(run, DEVICE)
    peak = peak_gib(DEVICE) - others / 2**30
    return {"loss": float(loss), "seconds": seconds, "peak_gib": peak}


def _take_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return grads


def _norm(grads: dict[str, torch.Tensor]) -> float:
    return sum(float(grad.double().norm()) ** 2 for grad in grads.values()) ** 0.5


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.float(), b.float()
    dot = float((a * b).sum(dtype=torch.float64))
    return dot / (float(a.double().norm()) * float(b.double().norm()))


if __name__ == "__main__":
    sys.exit(main())
