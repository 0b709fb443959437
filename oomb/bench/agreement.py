"""Does a step at full size agree with transformers' own? `python -m oomb.bench.agreement`.

Random weights in the shapes of a 7-billion-parameter Qwen2, bf16, one sequence. The ordinary run is
transformers with layer checkpointing and SDPA; ours is one engine step. Every parameter's gradient
is compared, and time and peak memory of both are printed side by side.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, Qwen2Config

import oomb

QWEN2_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison, print a row per length, and write them as JSON; 1 if one disagrees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--policy", default="selective")
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed, torch.cuda.is_available() is False")
    model = _model(options.layers)
    config = oomb.EngineConfig(chunk_size=options.chunk, activation_policy=options.policy)
    rows = [compare(model, length, config) for length in options.lengths]
    if options.out:
        report = {**_machine(), "command": " ".join(sys.argv), "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["agrees"] for row in rows) else 1


def compare(model: torch.nn.Module, length: int, config: oomb.EngineConfig) -> dict[str, Any]:
    """One length: both runs, every parameter's gradient, time and memory."""
    ids = torch.randint(0, model.config.vocab_size, (1, length), device="cuda")
    ordinary = _measure(model, lambda: _ordinary_run(model, ids))
    expected = {name: p.grad for name, p in model.named_parameters()}
    with oomb.Engine(model, config) as engine:
        ours = _measure(model, lambda: engine.step(ids).loss)
        backend = engine.attention_backend
    norms, cosines = _compare_gradients(model, expected)
    row = {
        "tokens": length,
        "backend": backend,
        "chunk": config.chunk_size,
        "policy": config.activation_policy,
        "loss": ours["loss"],
        "loss_ordinary": ordinary["loss"],
        "grad_norm": norms[0],
        "grad_norm_ordinary": norms[1],
        "worst_cosine": min(cosines.values()),
        "worst_parameter": min(cosines, key=cosines.__getitem__),
        "tokens_per_s": length / ours["seconds"],
        "tokens_per_s_ordinary": length / ordinary["seconds"],
        "peak_gib": ours["peak_gib"],
        "peak_gib_ordinary": ordinary["peak_gib"],
    }
    row["agrees"] = abs(norms[0] / norms[1] - 1) < 0.005 and row["worst_cosine"] >= 0.999
    print({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    model.zero_grad(set_to_none=True)
    return row


def _model(layers: int) -> torch.nn.Module:
    config = Qwen2Config(**{**QWEN2_7B, "num_hidden_layers": layers})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.gradient_checkpointing_enable()
    return model.train()


def _ordinary_run(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
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
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    peak = (torch.cuda.max_memory_allocated() - others) / 2**30
    return {"loss": float(loss), "seconds": seconds, "peak_gib": peak}


def _compare_gradients(
    model: torch.nn.Module, expected: dict[str, torch.Tensor]
) -> tuple[tuple[float, float], dict[str, float]]:
    """Norms over all parameters (ours, theirs), and each parameter's cosine."""
    squares, cosines = [0.0, 0.0], {}
    for name, parameter in model.named_parameters():
        ours, theirs = parameter.grad.float(), expected[name].float()
        a, b = float(ours.double().norm()), float(theirs.double().norm())
        dot = float((ours * theirs).sum(dtype=torch.float64))
        squares = [squares[0] + a * a, squares[1] + b * b]
        cosines[name] = dot / (a * b)
    return (squares[0] ** 0.5, squares[1] ** 0.5), cosines


def _machine() -> dict[str, str]:
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
