"""The kernel ladder: how each step moved the kernels. `python -m oomb.bench.ladder`.

Every rung is our own kernels in one configuration, over the same scattered pages, beside the
vendor's kernels on the same numbers and the rate of a plain matrix product.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from oomb.attention.api import Mask
from oomb.bench.machine import machine_facts
from oomb.bench.timing import elapsed, mark

if TYPE_CHECKING:
    from oomb.attention.impl.triton.part import Part

HEADS, KV_HEADS, HEAD_DIM, PAGE = 28, 4, 128, 128
QUERIES, KEYS = 4096, 131072
REPEATS = 5
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Rung:
    """One configuration.

    Attributes:
        way: forward or backward.
        name: what it is.
        why: why it moved, in one sentence.
        tile: queries, keys, warps, stages of the kernels; None takes the shipped ones.
        gather: whether rows are loaded one by one.
        atomic: whether page gradients are added atomically, and into which dtype.
    """

    way: str
    name: str
    why: str
    tile: tuple[int, int, int, int] | None = None
    gather: bool = False
    atomic: torch.dtype | None = None


RUNGS = (
    Rung(
        FORWARD, "rows gathered one by one",
        "Every row of K and V is found through the page table and waited for before it is used.",
        (64, 64, 4, 1), gather=True,
    ),
    Rung(
        FORWARD, "rows gathered ahead",
        "Loads of later tiles run while this one is multiplied; addresses still take registers "
        "and instructions for every row.",
        (64, 64, 4, 3), gather=True,
    ),
    Rung(
        FORWARD, "one descriptor per tile",
        "A tile lies inside one page, so one instruction of the copy engine brings all of it.",
        (64, 64, 4, 3),
    ),
    Rung(
        FORWARD, "128 queries, 8 warps",
        "Each tile of K and V serves twice the queries, but a program takes 128 KiB of shared "
        "memory, so that one fits a multiprocessor; 64 queries take 112 KiB, and two fit.",
        (128, 64, 8, 3),
    ),
    Rung(
        FORWARD, "128 queries on 4 warps, 2 stages",
        "A program takes 96 KiB, so that two share a multiprocessor again and one's softmax can "
        "run under the other's products: it regains most of what the rung above lost, and is "
        "level with 64 queries.",
    ),
    Rung(
        BACKWARD, "atomic additions, fp32",
        "Every program adds to every page, and waits where others add too.",
        (64, 64, 4, 2), atomic=torch.float32,
    ),
    Rung(
        BACKWARD, "atomic additions, bf16",
        "Half the bytes, and a rounding at every addition: as the OOMB paper (arXiv 2602.02108) "
        "has it.",
        (64, 64, 4, 2), atomic=torch.bfloat16,
    ),
    Rung(
        BACKWARD, "owners, rows gathered one by one",
        "One program owns a tile of keys and adds once, in the same order on every run; scores "
        "are computed twice for it.",
        (64, 64, 4, 1), gather=True,
    ),
    Rung(
        BACKWARD, "owners, descriptors",
        "The copy engine brings queries and keys two tiles ahead; small loads are fetched a step "
        "before they are used.",
        (64, 64, 4, 2),
    ),
    Rung(
        BACKWARD, "owners, 128 keys",
        "Twice the keys for every query that is loaded, three tiles ahead.",
    ),
)  # fmt: skip


class Problem:
    """Queries over keys in pages that lie anywhere in a pool."""

    def __init__(self, queries: int, keys: int) -> None:
        torch.manual_seed(0)
        device, dtype = torch.device("cuda"), torch.bfloat16
        pages = keys // PAGE
        shape = (1, 2 * keys, KV_HEADS, HEAD_DIM)  # of each page, K's rows and then V's
        pool = torch.randn(shape, device=device, dtype=dtype).transpose(1, 2)
        self.k, self.v = pool[:, :, :-PAGE], pool[:, :, PAGE:]
        self.rows = (2 * PAGE * torch.randperm(pages, device=device)).int()
        self.keys = keys
        q, grad = (
            torch.randn(1, queries, HEADS, HEAD_DIM, device=device, dtype=dtype).transpose(1, 2)
            for _ in range(2)
        )
        self.q, self.grad = q, grad
        self.scale = HEAD_DIM**-0.5
        self.out = torch.empty(1, queries, HEADS, HEAD_DIM, device=device)
        self.lse = torch.empty(1, HEADS, queries, device=device)
        self.flops = 4 * HEADS * queries * keys * HEAD_DIM

    def part(self, rung: Rung) -> Part:
        """The keys, to be read as a rung reads them."""
        from oomb.attention.impl.triton.configs import Tile
        from oomb.attention.impl.triton.part import Part

        class RungPart(Part):
            """Keys read with a given tile."""

            def candidates(self, kernel: str) -> list[Tile]:
                """The rung's tile alone."""
                return [Tile(*rung.tile)] if rung.tile else super().candidates(kernel)

            def fit(self, tile: Tile) -> tuple[int, bool]:
                """As the rung gathers."""
                return (tile.keys, True) if rung.gather else super().fit(tile)

            def key(self, kernel: str) -> tuple:
                """Rungs remember apart."""
                return (*super().key(kernel), rung.name)

        dtype = rung.atomic or torch.float32
        rows = self.k.shape[2] + PAGE
        grads = self.k.new_zeros(1, rows, KV_HEADS, HEAD_DIM, dtype=dtype).transpose(1, 2)
        return RungPart(
            self.k, self.v, self.keys, grads[:, :, :-PAGE], grads[:, :, PAGE:], self.rows, PAGE,
            offset=self.keys,
        )  # fmt: skip

    def dense(self) -> list[torch.Tensor]:
        """K and V in order, [1, G, keys, dim], for kernels that know no pages."""
        at = (self.rows[:, None] + torch.arange(PAGE, device="cuda")).flatten()
        return [x[:, :, at].contiguous() for x in (self.k, self.v)]


def measure(queries: int = QUERIES, keys: int = KEYS) -> dict[str, Any]:
    """Every rung and what stands beside them; prints as it goes."""
    from oomb.attention.impl.library import CudnnBackend
    from oomb.attention.impl.triton.backend import backward, forward, row_dots

    problem = Problem(queries, keys)
    k, v = problem.dense()
    q, grad = problem.q, problem.grad
    cudnn, mask = CudnnBackend(), Mask()
    out, lse = cudnn.forward(q, k, v, problem.scale, mask)
    true_grad = cudnn.backward(grad, q, k, v, out, lse, problem.scale, mask)[0]
    delta = row_dots(out.transpose(1, 2), grad.transpose(1, 2))
    ceiling = _matmul_tflops()
    rows = []
    for rung in RUNGS:
        part = problem.part(rung)
        if rung.way == FORWARD:
            run = _forward_run(forward, part, problem)
            tflops = problem.flops / _seconds(run) / 1e12
            error = _relative(problem.out, out.transpose(1, 2))
        else:
            grad_q = torch.empty_like(q)
            run = _backward_run(backward, part, problem, lse, delta, grad_q, rung)
            tflops = 2.5 * problem.flops / _seconds(run) / 1e12
            error = _relative(grad_q, true_grad)
        row = asdict(rung) | {"atomic": str(rung.atomic) if rung.atomic else None}
        del row["why"]
        rows.append({**row, "tflops": tflops, "share": tflops / ceiling, "from_cudnn": error})
        print(f"{rung.way:9} {rung.name:34} {tflops:6.0f} {tflops / ceiling:5.0%} {error:.1e}")
    peers = {
        "cuDNN": (
            lambda: cudnn.forward(q, k, v, problem.scale, mask),
            lambda: cudnn.backward(grad, q, k, v, out, lse, problem.scale, mask),
        ),
    }
    beside = {
        name: {
            FORWARD: problem.flops / _seconds(run) / 1e12,
            BACKWARD: 2.5 * problem.flops / _seconds(back) / 1e12,
        }
        for name, (run, back) in peers.items()
    }
    print(beside, f"matrix product {ceiling:.0f}")
    return {"queries": queries, "keys": keys, "ceiling": ceiling, "rungs": rows, "beside": beside}


def _forward_run(forward: Callable, part: Part, problem: Problem) -> Callable[[], None]:
    return lambda: forward(part, problem.q, problem.scale, problem.out, problem.lse)


def _backward_run(
    backward: Callable, part: Part, problem: Problem, lse, delta, grad_q, rung: Rung
) -> Callable[[], None]:
    arguments = (part, problem.q, problem.grad, lse, delta, problem.scale, grad_q)
    return lambda: backward(*arguments, atomic=rung.atomic is not None)


def _seconds(run: Callable[[], Any]) -> float:
    device, times = torch.device("cuda"), []
    for _ in range(REPEATS + 1):  # the first one compiles
        begin = mark(device)
        run()
        end = mark(device)
        torch.cuda.synchronize()
        times.append(elapsed(begin, end))
    return median(times[1:])


def _matmul_tflops(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b) / 1e12


def _relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.float() - truth.float()).norm() / truth.float().norm())


# What the rungs without a tile of their own ran: the first entries of `configs.py` on Hopper.
SHIPPED = {
    "attend": (128, 64, 4, 2),
    "key_grads": (64, 128, 8, 3),
    "query_grads": (128, 128, 8, 2),
}


def render(report: dict[str, Any]) -> str:
    """`ladder.md` from a report."""
    lines = [
        "# The kernel ladder",
        "",
        f"{report['queries']:,} queries over {report['keys']:,} keys in scattered pages of {PAGE}, "
        f"{HEADS} query and {KV_HEADS} key/value heads of {HEAD_DIM}, bf16, on one "
        f"{report['gpu']}, {report['date']}, torch {report['torch']}, triton {report['triton']}: "
        f"`{report['command']}`.",
        "",
        f"A matrix product of 8192^3 runs at {report['ceiling']:.0f} TFLOP/s there. The column "
        "*of the product* is a rung's TFLOP/s divided by those: at 50% it takes twice the time "
        "that the operations counted would take at that rate. The backward counts 2.5 times the "
        "forward's operations (five products instead of two), whatever a kernel does; with owners, "
        "ours does 3.5 times (seven), so that its matrix units do 7/5 of what is shown.",
        "",
        "A tile is queries x keys, warps, stages (tiles of keys, or of queries, on their way from "
        "memory at a time). The rung in bold ships, for history that no mask cuts; masks take "
        "smaller tiles, see `configs.py`.",
    ]
    why = {(rung.way, rung.name): rung.why for rung in RUNGS}
    for way in (FORWARD, BACKWARD):
        lines += ["", f"## {way.capitalize()}", ""]
        lines += ["| rung | tile | TFLOP/s | of the product | why |"]
        lines += ["| --- | --- | ---: | ---: | --- |"]
        for rung in report["rungs"]:
            if rung["way"] == way:
                reason = why[way, rung["name"]]
                name = rung["name"] if rung["tile"] else f"**{rung['name']}** (ships)"
                speed = f"{rung['tflops']:.0f} | {rung['share']:.0%}"
                lines.append(f"| {name} | {_tiles(rung)} | {speed} | {reason} |")
        for name, tflops in report["beside"].items():
            share = tflops[way] / report["ceiling"]
            lines.append(f"| {name} | | {tflops[way]:.0f} | {share:.0%} | The vendor's kernel. |")
    return "\n".join(lines) + "\n"


def _tiles(rung: dict[str, Any]) -> str:
    """A recorded rung's tile in words; the backward that ships has one for each of its kernels."""

    def said(tile: Sequence[int]) -> str:
        queries, keys, warps, stages = tile
        return f"{queries} x {keys}, {warps}, {stages}"

    if rung["tile"]:
        return said(rung["tile"])
    if rung["way"] == FORWARD:
        return said(SHIPPED["attend"])
    return f"keys' {said(SHIPPED['key_grads'])}; queries' {said(SHIPPED['query_grads'])}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed, torch.cuda.is_available() is False")
    if min(options.queries, options.keys) < 1 or options.keys % PAGE:
        parser.error(f"--keys must be a multiple of {PAGE}, got {options.keys}")
    report = machine_facts(torch.device("cuda")) | {"command": "python -m oomb.bench.ladder"}
    report |= measure(options.queries, options.keys)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
