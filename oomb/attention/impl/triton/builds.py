"""Builds the kernels for GPUs that are not there. `python -m oomb.attention.impl.triton.builds`.

Each kernel is compiled ahead of time for the tile that a device would try first, and for the next
one where that needs more shared memory than the device has: what `launch_first_that_fits` does at
run time. Registers and spills are read from the machine code.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGES = (16, 64, 128, 256)
OWN_MASKS, PAGE_MASKS = ("causal", "causal window", "causal documents"), ("dense", "window")
KERNELS = ("attend", "key_grads", "query_grads")
CHIPS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that a program may have, by compute capability."""
GROUP = 7
INTEGERS_OF_ANY_SIZE = ("offset", "window")
POINTERS = {"page_rows": "*i32", "lowest_ptr": "*i32", "beyond_ptr": "*i32"}


@dataclass(frozen=True)
class Build:
    """A kernel for a chip, and what it attends to: pages, or the own chunk (page 0)."""

    kernel: str
    dtype: str
    head_dim: int
    page: int
    mask: str
    chip: int


def builds() -> list[Build]:
    """Everything that the backend launches."""
    parts = [(0, mask) for mask in OWN_MASKS] + list(itertools.product(PAGES, PAGE_MASKS))
    return [
        Build(kernel, dtype, dim, *part, chip)
        for chip, dtype, dim, part, kernel in itertools.product(
            CHIPS, DTYPES, HEAD_DIMS, parts, KERNELS
        )
    ]


def sample(seed: int) -> list[Build]:
    """What people run most, bf16 with a head dim of 128, and a seeded tenth of the rest."""
    default = [
        build
        for build in builds()
        if (build.dtype, build.head_dim) == ("bf16", 128)
        and (build.page, build.mask) in ((0, "causal"), (128, "dense"))
    ]
    rest = [build for build in builds() if build not in default]
    return default + random.Random(seed).sample(rest, len(rest) // 10)


def compile_build(build: Build) -> dict[str, Any]:
    """Compile until a tile fits; returns tile, shared memory, registers and spilled bytes."""
    from oomb.attention.impl.triton.configs import has_copy_engine, tiles
    from oomb.attention.impl.triton.part import Part

    k = torch.empty(1, 4, 4096, build.head_dim, dtype=DTYPES[build.dtype], device="meta")
    marks = {"window": 4096} if "window" in build.mask else {}
    marks |= {"lowest": k, "beyond": k} if "documents" in build.mask else {}
    capability = (build.chip // 10, build.chip % 10)
    marks["copies"] = has_copy_engine(capability)
    part = Part(k, k, 4096, page=build.page, causal="causal" in build.mask, **marks)
    cut = part.cut(build.kernel)
    found = tiles(build.kernel, capability, k.dtype, part.width, cut=cut)
    row: dict[str, Any] = {**asdict(build), "fits": False}
    for tried, tile in enumerate(part.by_fit(found)):
        try:
            row |= {"tile": list(asdict(tile).values()), "tried": tried}
            row |= _compile(build, part, tile)
        except Exception as error:
            return row | {"failed": f"{type(error).__name__}: {error}"[:300]}
        if row["shared"] <= CHIPS[build.chip]:
            return row | {"fits": True}
    return row


def _compile(build: Build, part: Any, tile: Any) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from oomb.attention.impl.triton import backward, forward

    module = forward if build.kernel == "attend" else backward
    kernel = getattr(module, build.kernel + "_kernel")
    keys, gather = part.fit(tile)
    constants = part.flags(keys, gather)
    constants |= {"GROUP": GROUP, "BM": tile.queries, "HAS_STATE": build.page == 0, "ATOMIC": False}
    constants["COPIES"] = part.copies
    absent = ("k_desc", "v_desc") if gather else ("k_ptr", "v_ptr")
    if build.kernel == "key_grads":
        absent += ("q_ptr", "grad_ptr") if part.copies else ("q_desc", "grad_desc")
    absent += () if part.lowest is not None else ("lowest_ptr", "beyond_ptr")
    absent += () if build.page == 0 else ("state_ptr", "state_lse_ptr")
    absent += () if build.page else ("page_rows",)
    constants |= dict.fromkeys(absent)
    blocks = {"k_desc": keys, "v_desc": keys, "q_desc": tile.queries, "grad_desc": tile.queries}
    signature, values, divisible = {}, {}, {}
    for number, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(number,)] = "constexpr", constants[name]
            continue
        signature[name] = _type(name, build, blocks, part.width)
        is_address = signature[name].startswith("*")
        is_size = signature[name] == "i32" and name not in INTEGERS_OF_ANY_SIZE
        if is_address or is_size:
            divisible[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=divisible)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    built = triton.compile(source, target=GPUTarget("cuda", build.chip, 32), options=options)
    registers, spilled = _usage(built.asm["cubin"], Path(triton.__file__).parent)
    return {"shared": built.metadata.shared, "registers": registers, "spilled": spilled}


def _type(name: str, build: Build, blocks: dict[str, int], width: int) -> str:
    if name in blocks:
        return f"tensordesc<{build.dtype}[1,1,{blocks[name]},{width}]>"
    # The own chunk comes last and writes the result; parts before it write the state, in fp32.
    results = ("out_ptr", "grad_q_ptr") if build.page == 0 else ()
    if name in ("q_ptr", "k_ptr", "v_ptr", "grad_ptr", *results):
        return "*" + build.dtype
    if name.endswith("_ptr") or name == "page_rows":
        return POINTERS.get(name, "*fp32")
    return "fp32" if name == "scale" else "i32"


def _usage(cubin: bytes, package: Path) -> tuple[int, int]:
    """Registers per thread, and bytes per thread that did not fit into them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = package / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    return int(found[1]), int(found[2])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and extremes per chip."""
    report = {}
    for chip in CHIPS:
        here = [row for row in rows if row["chip"] == chip]
        built = [row for row in here if "registers" in row]
        report[f"sm_{chip}"] = {
            "builds": len(here),
            "fit": sum(row["fits"] for row in here),
            "fit_at_first": sum(row["fits"] and row["tried"] == 0 for row in here),
            "most_shared": max((row["shared"] for row in built), default=0),
            "spill": sum(row["spilled"] > 0 for row in built),
            "most_spilled": max((row["spilled"] for row in built), default=0),
        }
    return report


def main(arguments: list[str] | None = None) -> int:
    """Build, print a summary and every build that does not fit; 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, metavar="SEED", help="the default and a tenth")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--out", type=Path, help="write the builds here as JSON")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET must not be 1: interpreted kernels cannot be compiled")
    wanted = builds() if options.sample is None else sample(options.sample)
    spawn = multiprocessing.get_context("spawn")
    # An executor says so where a compiler takes its process down; a Pool would wait for it.
    with ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:
        rows = list(pool.map(compile_build, wanted, chunksize=4))
    import triton

    report = {"triton": triton.__version__, "chips": summary(rows)}
    print(json.dumps(report, indent=1))
    for row in rows:
        if not row["fits"]:
            print("does not fit:", row)
    if options.out:
        lines = ",\n  ".join(map(json.dumps, rows))
        head = json.dumps(report, indent=1)[:-2]
        options.out.write_text(f'{head},\n "builds": [\n  {lines}\n ]\n}}\n')
    return 0 if all(row["fits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
