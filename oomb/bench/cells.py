"""Every cell of the Triton kernels on this GPU: right, and how fast. `python -m oomb.bench.cells`.

A cell is a dtype, a head dim, a page size and a mask. Its attention, a chunk over scattered pages
and over itself, is compared with fp64 beside an independent run in PyTorch, and timed at a larger
size. FLOPs are those of visible pairs: 4 H D each forward, 2.5 times that backward.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from oomb.attention import LayerCall, attend, attend_backward, choose_backend
from oomb.bench.machine import machine_facts
from oomb.bench.timing import elapsed, mark
from oomb.cache import History
from oomb.cache.pool import LayerShape
from oomb.chunking import plan_chunks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGES = (16, 64, 128, 256)
MASKS = ("dense", "window", "documents")
CHECKED, TIMED, HEADLINE = (512, 3), {2: (8192, 3), 4: (2048, 3)}, (4096, 8)
"""Tokens of a chunk, and how many chunks of history it reads; timed by bytes of a number."""
ENOUGH = 0.6
"""Share of the headline's speed that cells of 16 bits and pages of 64 and more should reach."""
SLACK = 1e-6
"""Three TF32 products stand for one in fp32, and lose a little of it."""
REPEATS = 5
NAMES = ("out", "dq", "dk", "dv")
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Cell:
    """One configuration; the headline is bf16, 128, 128, dense."""

    dtype: str
    head_dim: int
    page: int
    mask: str

    @property
    def heads(self) -> tuple[int, int]:
        """Query and key/value heads; the wide ones have half as many."""
        return (28, 4) if self.head_dim <= 128 else (14, 2)

    @property
    def counts(self) -> bool:
        """Whether it should be fast."""
        return self.dtype != "fp32" and self.page >= 64


def cells() -> list[Cell]:
    """All of them."""
    return [Cell(*each) for each in itertools.product(DTYPES, HEAD_DIMS, PAGES, MASKS)]


class Problem:
    """A chunk's attention in one cell.

    Args:
        cell: what is computed.
        size: tokens of the chunk, and chunks of history.
    """

    def __init__(self, cell: Cell, size: tuple[int, int]) -> None:
        torch.manual_seed(0)
        chunk, before = size
        history, tokens = chunk * before, chunk * (before + 1)
        self.cell, self.history_tokens, self.tokens = cell, history, tokens
        self.window = chunk if cell.mask == "window" else None
        cut = cell.mask == "documents"
        self.starts = [0, *(history + chunk // 4 * n + 5 for n in (1, 2, 3))] if cut else [0]
        heads, kv_heads = cell.heads
        dtype, shape = DTYPES[cell.dtype], (1, tokens, kv_heads, cell.head_dim)
        self.k, self.v = (
            torch.randn(shape, device=DEVICE, dtype=dtype).transpose(1, 2) for _ in range(2)
        )
        q, grad = (
            torch.randn(1, chunk, heads, cell.head_dim, device=DEVICE, dtype=dtype)
            for _ in range(2)
        )
        self.q, self.grad_out = q.transpose(1, 2), grad
        plan = plan_chunks([tokens], [self.starts], chunk_size=chunk, page_size=cell.page)
        self.pages = History(
            [LayerShape(kv_heads, cell.head_dim, dtype)],
            pages_per_row=plan.pages_per_row,
            page_size=cell.page,
            segment_pages=1,
            page_grad_dtype=torch.float32,
            device=DEVICE,
        )
        random.Random(0).shuffle(self.pages.table._free)  # pages anywhere in the pool
        self.pages.table.hold(0, 0, history)
        self.pages.write(0, 0, 0, self.k[0, :, :history], self.v[0, :, :history])
        self.pages.open_gradients()
        self.scale = cell.head_dim**-0.5
        backend = choose_backend("triton", device=DEVICE, dtype=dtype, head_dims={cell.head_dim})
        self.call = LayerCall(0, self.scale, self.window, plan.chunks[-1], self.pages, backend)
        self.own = [x[:, :, history:] for x in (self.k, self.v)]

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Out [1, N, H, D] and lse [1, H, N]."""
        return attend(self.call, self.q, *self.own)

    def backward(self, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Gradients of q and the own k and v; those of the pages grow."""
        return attend_backward(self.call, self.grad_out, self.q, *self.own, *state)

    def results(self) -> list[torch.Tensor]:
        """out and dq [H, N, D], dk and dv [G, all tokens, D], from empty page gradients."""
        state = self.forward()
        dq, *own = self.backward(state)
        pages = [
            (s.grad_k[0], s.grad_v[0])
            for s in self.pages.segments(0, 0, 0, self.history_tokens, gradients=True)
        ]
        pages = [torch.cat(each, 1) for each in zip(*pages, strict=True)]
        grads = [torch.cat([a.float(), b[0].float()], 1) for a, b in zip(pages, own, strict=True)]
        return [state[0][0].transpose(0, 1), dq[0], *grads]

    def seen(self) -> torch.Tensor:
        """Bool [N, all tokens]: which keys each query of the chunk sees."""
        at = torch.arange(self.tokens, device=DEVICE)
        back = at[self.history_tokens :, None] - at
        seen = back >= 0
        if self.window is not None:
            seen &= back < self.window
        document = torch.bucketize(at, torch.tensor(self.starts, device=DEVICE), right=True)
        return seen & (document[self.history_tokens :, None] == document)

    def pairs(self) -> int:
        """How many they are."""
        return int(self.seen().sum())

    def formula(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The same by softmax of all scores and autograd, in `dtype`."""
        seen, found = self.seen(), []
        group = self.q.shape[1] // self.k.shape[1]
        for head in range(self.k.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            here = (self.q[0, heads], self.k[0, head], self.v[0, head])
            q, k, v = (x.to(dtype).detach().requires_grad_() for x in here)
            scores = (q @ k.T * self.scale).masked_fill(~seen, float("-inf"))
            out = scores.softmax(-1) @ v
            grad = self.grad_out[0, :, heads].transpose(0, 1).to(dtype)
            found.append((out.detach(), *torch.autograd.grad(out, (q, k, v), grad)))
        outs, dqs, dks, dvs = zip(*found, strict=True)
        return [torch.cat(outs), torch.cat(dqs), torch.stack(dks), torch.stack(dvs)]


def check(cell: Cell) -> dict[str, Any]:
    """Errors of the kernels and of PyTorch in the cell's dtype, against fp64."""
    try:
        problem = Problem(cell, CHECKED)
        exact = problem.formula(torch.float64)
        row = {
            "errors": _errors(problem.results(), exact),
            "errors_of_pytorch": _errors(problem.formula(DTYPES[cell.dtype]), exact),
        }
    except Exception as error:  # one cell that breaks leaves the others their place in the table
        return {**asdict(cell), "failed": f"{type(error).__name__}: {error}"[:300]}
    pairs = zip(*map(dict.values, row.values()), strict=True)
    return {**asdict(cell), **row, "right": all(a <= 2 * b + SLACK for a, b in pairs)}


def _errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, float]:
    return {
        name: float((a.double() - b).norm() / b.norm())
        for name, a, b in zip(NAMES, found, exact, strict=True)
    }


def speed(cell: Cell, size: tuple[int, int] | None = None) -> dict[str, float]:
    """TFLOP/s forward and backward."""
    problem = Problem(cell, size or TIMED[DTYPES[cell.dtype].itemsize])
    flops = 4 * cell.heads[0] * cell.head_dim * problem.pairs()
    state = problem.forward()
    forward = _seconds(problem.forward)
    backward = _seconds(lambda: problem.backward(state))
    return {
        "forward_tflops": flops / forward / 1e12,
        "backward_tflops": 2.5 * flops / backward / 1e12,
    }


def _seconds(run) -> float:
    times = []
    for _ in range(REPEATS + 1):
        begin = mark(DEVICE)
        run()
        end = mark(DEVICE)
        torch.cuda.synchronize()
        times.append(elapsed(begin, end))
    return median(times[1:])


def table(report: dict[str, Any]) -> str:
    """Markdown: a row per dtype and head dim, over its page sizes and masks."""
    lines = [
        "| dtype | head dim | right | worst error / PyTorch's | forward TFLOP/s | "
        "backward TFLOP/s | below 0.6 of the headline |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for dtype, dim in itertools.product(DTYPES, HEAD_DIMS):
        rows = [r for r in report["cells"] if (r["dtype"], r["head_dim"]) == (dtype, dim)]
        done = [r for r in rows if "failed" not in r]
        right = f"{sum(r['right'] for r in done)} of {len(rows)}"
        if not done:
            lines.append(f"| {dtype} | {dim} | {right} | | | | |")
            continue
        ratios = [r["errors"][n] / r["errors_of_pytorch"][n] for r in done for n in NAMES]
        timed = [r for r in done if "forward_tflops" in r]
        speeds = [_span([r[f"{way}_tflops"] for r in timed]) for way in ("forward", "backward")]
        counted = [r for r in timed if r["fast_enough"] is not None]
        slow = f"{sum(not r['fast_enough'] for r in counted)} of {len(counted)}" if counted else ""
        cells_ = (dtype, dim, right, f"{max(ratios):.2f}", *speeds, slow)
        lines.append("| " + " | ".join(map(str, cells_)) + " |")
    return "\n".join(lines)


def _span(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}" if values else "not timed"


def main(arguments: list[str] | None = None) -> int:
    """Check all cells in parallel processes, then time them one by one; 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile and check")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed, torch.cuda.is_available() is False")
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        rows = pool.map(check, cells(), chunksize=3)
    headline = speed(Cell("bf16", 128, 128, "dense"), HEADLINE)
    command = "python -m oomb.bench.cells"
    report = {**machine_facts(DEVICE), "command": command, "headline": headline}
    report["cells"] = rows
    for number, (cell, row) in enumerate(zip(cells(), rows, strict=True), 1):
        if "failed" not in row:
            row |= speed(cell)
            enough = all(row[way] >= ENOUGH * headline[way] for way in headline)
            row["fast_enough"] = enough if cell.counts else None
        if options.out and (number % 20 == 0 or number == len(rows)):
            print(f"{number} of {len(rows)} cells", flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(headline, table(report), sep="\n")
    return 0 if all(row.get("right") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
