"""`oomb plan`."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from oomb.cli.common import (
    GpuBudget,
    KeepFillOutputs,
    Offload,
    PageDtype,
    PageGradRounding,
    refusals,
)


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

    with refusals():
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
