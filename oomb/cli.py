"""The command line: `oomb demo`, `oomb plan` and `oomb bench`."""

from __future__ import annotations

import json as json_module
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Train language models on long contexts by chunk recurrence, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure OOMB beside what people use otherwise.", no_args_is_help=True)
app.add_typer(bench, name="bench")


# Options that several commands have.
KeepFillOutputs = Annotated[
    bool, typer.Option(help="Keep the fill's attention outputs for the sweep.")
]
Offload = Annotated[bool, typer.Option(help="Let pages live in host memory.")]
GpuBudget = Annotated[float, typer.Option(help="GiB of pages that stay on the GPU with --offload.")]
PageDtype = Annotated[str, typer.Option(help="Of K and V in pages: model or fp8.")]
PageGradRounding = Annotated[
    str, typer.Option(help="Of bf16 gradients in pages: stochastic or nearest.")
]
Seconds = Annotated[float, typer.Option(help="Repeat each step for this long.")]


def _version(wanted: bool) -> None:
    if wanted:
        import oomb

        typer.echo(f"oomb {oomb.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models on long contexts by chunk recurrence, exactly."""


@app.command()
def demo(
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to train and, at its end, test on.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a transformers causal LM and its tokenizer.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each training step.")] = 16384,
    chunk: Annotated[int, typer.Option(help="Tokens computed at once.")] = 2048,
    page: Annotated[int, typer.Option(help="Tokens of one K/V page; divides --chunk.")] = 128,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 3,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 5e-4,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    out: Annotated[Path, typer.Option(help="Write the recording to this file.")] = Path(
        "demo.oomb"
    ),
) -> None:
    """Fine-tune a model over a long context, and compare with running it whole.

    Without --text and --model it takes the gospels and the small model that ship with OOMB.

    Exit code 1: a gradient differs by more than 1e-5. Exit code 2: bad input, nothing was done.
    """
    # Threads that spin while they wait would lose a core to any other busy program.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Imported here, so that --help and --version do not wait for PyTorch and transformers.
    from oomb.demo.inputs import DemoOptions, load
    from oomb.demo.report import Progress, show_figures, show_inputs, without_infinities
    from oomb.demo.run import run

    console = Console(highlight=False)
    with _refusals():
        inputs = load(
            DemoOptions(
                text=text, model=model, context=context, chunk=chunk, page=page, steps=steps,
                lr=lr, device=device, json=json, out=out,
            )
        )  # fmt: skip
        show_inputs(inputs, console)
        with Progress(console) as progress:
            figures = run(inputs, progress)
        if json is not None:
            write_json(json, without_infinities(figures))
    show_figures(figures, console)
    if not figures["gradients"]["within_limit"]:
        raise typer.Exit(1)


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
    from oomb.demo.report import without_infinities

    with _refusals():
        settings = check(
            AttentionOptions(
                queries=queries, keys=keys, square=square, heads=heads, kv_heads=kv_heads,
                head_dim=head_dim, dtype=dtype, page_grad_dtype=page_grad_dtype, page=page,
                segment=segment, backends=backends, peers=peers, error=error, rounds=rounds,
                device=device, out=out,
            )
        )  # fmt: skip
        report = run(settings, _command(), make_console())
        if out is not None:
            write_json(out, without_infinities(report))
    if failed(report):
        raise typer.Exit(1)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="Folder of a transformers model, or qwen2-7b.")
    ] = "qwen2-7b",
    context: Annotated[int, typer.Option(help="Tokens of a step.")] = 262144,
    chunk: Annotated[int, typer.Option(help="Tokens computed at once.")] = 4096,
    page: Annotated[int, typer.Option(help="Tokens of one K/V page.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of the weights: bf16, fp16, fp32 or fp64.")] = "bf16",
    policy: Annotated[str, typer.Option(help="keep, selective or layer.")] = "selective",
    grad_dtype: Annotated[str, typer.Option(help="Of weight gradients.")] = "fp32",
    page_dtype: PageDtype = "model",
    page_grad_dtype: Annotated[str, typer.Option(help="Of gradients in pages.")] = "fp32",
    page_grad_rounding: PageGradRounding = "stochastic",
    live_chunks: Annotated[int, typer.Option(help="Chunks whose activations stay alive.")] = 1,
    keep_fill_outputs: KeepFillOutputs = False,
    offload: Offload = False,
    gpu_budget: GpuBudget = 0.0,
    optimizer: Annotated[str, typer.Option(help="none, sgd, momentum or adamw.")] = "none",
    gpu: Annotated[
        float | None, typer.Option(help="GiB of GPU memory, instead of this machine's.")
    ] = None,
    host: Annotated[
        float | None, typer.Option(help="GiB of host memory, instead of this machine's.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print plain data, in bytes.")] = False,
) -> None:
    """Say where every byte of a step goes, whether it fits, and what to change if not.

    Exit code 1: it does not fit. Exit code 2: bad input.
    """
    from oomb.bench.console import make_console
    from oomb.demo.inputs import InputError
    from oomb.planner.inputs import PlanOptions, check
    from oomb.planner.memory import changes, longest_context, plan_step
    from oomb.planner.report import as_json, show

    with _refusals():
        sizes, config, machine = check(
            PlanOptions(
                model=model, context=context, chunk=chunk, page=page, dtype=dtype, policy=policy,
                grad_dtype=grad_dtype, page_dtype=page_dtype, page_grad_dtype=page_grad_dtype,
                page_grad_rounding=page_grad_rounding, live_chunks=live_chunks,
                keep_fill_outputs=keep_fill_outputs, offload=offload, gpu_budget=gpu_budget,
                optimizer=optimizer, gpu=gpu, host=host,
            )
        )  # fmt: skip
        try:
            found = plan_step(sizes, config, context, optimizer=optimizer)
        except ValueError as error:
            raise InputError(f"These settings make no step: {error}.") from error
        longest = longest_context(sizes, config, machine, optimizer=optimizer)
        longest = max(longest, context) if found.fits(machine) else longest
        changed = changes(sizes, config, context, machine, optimizer=optimizer)
    if json:
        typer.echo(json_module.dumps(as_json(found, machine, longest, changed), indent=1))
    else:
        show(found, machine, longest, changed, make_console())
    if not found.fits(machine):
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
    from oomb.demo.report import without_infinities

    with _refusals():
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
        report = run(settings, peer, _command(), make_console())
        if out is not None:
            write_json(out, without_infinities(report))
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
    from oomb.demo.report import without_infinities

    with _refusals():
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
        report = run(settings, resident, _command(), make_console())
        if out is not None:
            write_json(out, without_infinities(report))
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
    from oomb.demo.report import without_infinities

    with _refusals():
        settings = check(context, chunks, page, device, out)
        report = run(settings, _command(), make_console())
        if out is not None:
            write_json(out, without_infinities(report))


def _command() -> str:
    """The command that was run, less where its output went."""
    words = sys.argv[1:]
    if "--out" in words:
        at = words.index("--out")
        words = words[:at] + words[at + 2 :]
    return shlex.join(["oomb", *(word for word in words if not word.startswith("--out="))])


@contextmanager
def _refusals() -> Iterator[None]:
    """Inside, bad input is one sentence and exit code 2."""
    from oomb.demo.inputs import InputError

    try:
        yield
    except InputError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo("Stopped before the end.", err=True)
        raise typer.Exit(130) from None


def write_json(path: Path, figures: dict) -> None:
    """Write `figures`; the file appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json_module.dumps(figures, indent=1, allow_nan=False) + "\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    app()
