"""`oomb bench`: every published number is one of its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oomb.cli.common import (
    GpuBudget,
    KeepFillOutputs,
    Offload,
    PageDtype,
    PageGradRounding,
    Seconds,
    command_line,
    refusals,
    write_json,
)

bench = typer.Typer(help="Measure OOMB beside what people use otherwise.", no_args_is_help=True)


@bench.command("attention")
def bench_attention(
    queries: Annotated[int | None, typer.Option(help="Queries of each rectangle.")] = None,
    keys: Annotated[
        str | None, typer.Option(help="Keys of each rectangle, between commas, or none.")
    ] = None,
    square: Annotated[
        str | None, typer.Option(help="Sides of causal squares, between commas, or none.")
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 28,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads; divides --heads.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Numbers per head.")] = 128,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp64.")] = "bf16",
    page_grad_dtype: Annotated[str, typer.Option(help="Of gradients in pages.")] = "fp32",
    page: Annotated[int, typer.Option(help="Tokens of one K/V page.")] = 128,
    segment: Annotated[
        int | None, typer.Option(help="Tokens of a segment; the engine's choice if left out.")
    ] = None,
    backends: Annotated[
        str | None, typer.Option(help="library, triton, triton-atomic, reference: some, by commas.")
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure SDPA and FlexAttention too.")] = True,
    error: Annotated[bool, typer.Option(help="Compare every result with fp64.")] = True,
    rounds: Annotated[int, typer.Option(help="Turns that each implementation gets.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Time attention, forward and backward, over paged history and over a causal square.

    Sizes are in tokens; what is left out is chosen for the device.

    Exit code 1: a backend of OOMB raised. Exit code 2: bad input, nothing was done.
    """
    from oomb.bench.attention.options import AttentionOptions, check
    from oomb.bench.attention.run import failed, run
    from oomb.bench.console import make_console

    with refusals():
        settings = check(
            AttentionOptions(
                queries=queries, keys=keys, square=square, heads=heads, kv_heads=kv_heads,
                head_dim=head_dim, dtype=dtype, page_grad_dtype=page_grad_dtype, page=page,
                segment=segment, backends=backends, peers=peers, error=error, rounds=rounds,
                device=device, out=out,
            )
        )  # fmt: skip
        report = run(settings, command_line(), make_console())
        if out is not None:
            write_json(out, report)
    if failed(report):
        raise typer.Exit(1)


@bench.command("step")
def bench_step(
    shape: Annotated[str, typer.Option(help="qwen2-7b or tiny.")] = "qwen2-7b",
    layers: Annotated[int | None, typer.Option(help="Decoder layers, to cut the model.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens of a step, between commas.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens computed at once.")] = None,
    page: Annotated[int | None, typer.Option(help="Tokens of one K/V page.")] = None,
    policy: Annotated[str, typer.Option(help="keep, selective or layer.")] = "selective",
    grad_dtype: Annotated[
        str, typer.Option(help="Of the engine's weight gradients: bf16, fp16, fp32 or fp64.")
    ] = "fp32",
    page_dtype: PageDtype = "model",
    page_grad_dtype: Annotated[str, typer.Option(help="Of gradients in pages; the same.")] = "fp32",
    page_grad_rounding: PageGradRounding = "stochastic",
    live_chunks: Annotated[
        int, typer.Option(help="Chunks whose activations stay alive; above 1 with --policy keep.")
    ] = 1,
    keep_fill_outputs: KeepFillOutputs = False,
    offload: Offload = False,
    gpu_budget: GpuBudget = 0.0,
    ring_depth: Annotated[int, typer.Option(help="GPU buffers of --offload's ring.")] = 3,
    backend: Annotated[str, typer.Option(help="auto, or an attention backend.")] = "auto",
    accumulate: Annotated[
        str, typer.Option(help="How triton adds to page gradients: owner or atomic.")
    ] = "owner",
    liger: Annotated[bool, typer.Option(help="Liger's kernels, on both sides alike.")] = True,
    peer: Annotated[bool, typer.Option(help="Measure transformers too.")] = True,
    sample: Annotated[
        bool,
        typer.Option(help="Estimate OOMB's time from sampled chunks; transformers is not run."),
    ] = False,
    record: Annotated[
        bool, typer.Option(help="Record one more of OOMB's steps, for --out.")
    ] = False,
    seconds: Seconds = 10.0,
    warmup: Annotated[bool, typer.Option(help="One unmeasured step before each length.")] = True,
    split: Annotated[
        int, typer.Option(help="Profile one more step at lengths up to this; 0 for none.")
    ] = 32768,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Time whole training steps beside transformers with layer checkpointing and Liger.

    Sizes are in tokens; what is left out is chosen for the device.

    Exit code 1: the two sides' loss or gradient norm differ by more than 0.5 %, or OOMB's side
    failed. Exit code 2: bad input, nothing was done.
    """
    from oomb.bench.console import make_console
    from oomb.bench.step.options import StepOptions, check
    from oomb.bench.step.run import broken, disagree, run

    with refusals():
        settings = check(
            StepOptions(
                shape=shape, layers=layers, lengths=lengths, chunk=chunk, page=page, policy=policy,
                grad_dtype=grad_dtype, page_dtype=page_dtype, page_grad_dtype=page_grad_dtype,
                page_grad_rounding=page_grad_rounding,
                live_chunks=live_chunks, keep_fill_outputs=keep_fill_outputs,
                offload=offload, gpu_budget=gpu_budget, ring_depth=ring_depth,
                backend=backend, accumulate=accumulate,
                liger=liger, sample=sample, record=record, seconds=seconds, warmup=warmup,
                split=split, device=device, out=out,
            )
        )  # fmt: skip
        report = run(settings, peer, command_line(), make_console())
        if out is not None:
            write_json(out, report)
    if disagree(report) or broken(report):
        raise typer.Exit(1)


@bench.command("offload")
def bench_offload(
    shape: Annotated[str, typer.Option(help="qwen2-7b or tiny.")] = "qwen2-7b",
    layers: Annotated[int | None, typer.Option(help="Decoder layers, to cut the model.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens of a step, between commas.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens computed at once.")] = None,
    page: Annotated[int | None, typer.Option(help="Tokens of one K/V page.")] = None,
    policy: Annotated[str, typer.Option(help="keep, selective or layer.")] = "selective",
    grad_dtype: Annotated[
        str, typer.Option(help="Of weight gradients: bf16, fp16, fp32 or fp64.")
    ] = "bf16",
    page_grad_dtype: Annotated[str, typer.Option(help="Of gradients in pages; the same.")] = "fp32",
    page_grad_rounding: PageGradRounding = "stochastic",
    page_dtype: PageDtype = "model",
    keep_fill_outputs: KeepFillOutputs = False,
    gpu_budget: Annotated[float, typer.Option(help="GiB of pages that stay on the GPU.")] = 0.0,
    ring_depth: Annotated[int, typer.Option(help="GPU buffers of the ring.")] = 3,
    backend: Annotated[str, typer.Option(help="auto, or an attention backend.")] = "auto",
    liger: Annotated[bool, typer.Option(help="Liger's kernels.")] = True,
    resident: Annotated[bool, typer.Option(help="Measure the resident step too.")] = True,
    sample: Annotated[bool, typer.Option(help="Estimate from sampled chunks.")] = False,
    seconds: Seconds = 10.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Time steps with their pages on the host beside the same with their pages on the GPU.

    Exit code 1: loss or gradient norm differ by more than 0.5 %, or a side failed. Exit code 2: bad
    input, nothing was done.
    """
    from oomb.bench.console import make_console
    from oomb.bench.offload import failed, run
    from oomb.bench.step.options import StepOptions, check

    with refusals():
        settings = check(
            StepOptions(
                shape=shape, layers=layers, lengths=lengths, chunk=chunk, page=page, policy=policy,
                grad_dtype=grad_dtype, page_dtype=page_dtype, page_grad_dtype=page_grad_dtype,
                page_grad_rounding=page_grad_rounding, keep_fill_outputs=keep_fill_outputs,
                offload=True, gpu_budget=gpu_budget, ring_depth=ring_depth, backend=backend,
                liger=liger, sample=sample, record=True, seconds=seconds, split=0, device=device,
                out=out,
            )
        )  # fmt: skip
        report = run(settings, resident, command_line(), make_console())
        if out is not None:
            write_json(out, report)
    if failed(report):
        raise typer.Exit(1)


@bench.command("pages")
def bench_pages(
    context: Annotated[int, typer.Option(help="Tokens of a step.")] = 8192,
    chunks: Annotated[
        str, typer.Option(help="Into how many chunks it is cut, between commas.")
    ] = "4,16,64",
    page: Annotated[int, typer.Option(help="Tokens of one K/V page.")] = 128,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Measure the gradient error of fp8 pages and of bf16 page gradients, on real text.

    Exit code 2: bad input, nothing was done.
    """
    from oomb.bench.console import make_console
    from oomb.bench.pages import check, run

    with refusals():
        settings = check(context, chunks, page, device, out)
        report = run(settings, command_line(), make_console())
        if out is not None:
            write_json(out, report)
