"""`oomb bench pages`: what low-precision pages cost in the gradient, and save in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import oomb
from oomb.bench.inputs import (
    InputError,
    check_device,
    check_least,
    check_multiple,
    check_out,
    numbers,
)
from oomb.bench.machine import machine_facts
from oomb_assets import demo_model_dir, demo_text

BF16 = {"page_grad_dtype": torch.bfloat16}
OPTIONS: dict[str, dict[str, Any]] = {
    "fp8 pages": {"page_dtype": "fp8"},
    "bf16 page gradients": BF16,
    "bf16 page gradients, to nearest": {**BF16, "page_grad_rounding": "nearest"},
    "fp8 pages, bf16 page gradients": {**BF16, "page_dtype": "fp8"},
}
GROUPS = {
    "embedding": "embed_tokens",
    "queries": "q_proj",
    "keys": "k_proj",
    "values": "v_proj",
    "attention output": "o_proj",
    "MLP": "mlp.",
    "norms": "norm",
}
"""Parameters whose name contains the word, by group."""
PAGES = {"keys": "k_proj", "values": "v_proj"}
HOW = (
    "One step of the shipped demo model, in fp32, over the same tokens of real text, cut into more "
    "and more chunks. Errors are against the same step with full-precision pages: relative error "
    "||a - b|| / ||b||, and cosine. Page gradients: of the keys and values that have pages, "
    "complete with the terms of all later chunks. Bytes: of pages and their gradients, per token."
)


@dataclass(frozen=True)
class PagesSettings:
    """What to measure.

    Attributes:
        context: tokens of the step.
        chunks: into how many chunks it is cut, one after the other.
        page: tokens of a page.
        device: of the model.
    """

    context: int
    chunks: list[int]
    page: int
    device: torch.device


def check(context: int, chunks: str, page: int, device: str, out: Path | None) -> PagesSettings:
    """Check the command line before any work.

    Args:
        context: tokens of the step.
        chunks: numbers of chunks, between commas.
        page: tokens of a page.
        device: auto, cpu or cuda.
        out: file for the figures, or None.

    Returns:
        What to measure.

    Raises:
        InputError: an option cannot be used.
    """
    check_out(out)
    check_least("--page", page, 1)
    counts = numbers("--chunks", chunks, least=2)  # a single chunk has no pages
    if not counts:
        raise InputError("--chunks must name at least one number of chunks, such as 4,16,64.")
    for count in counts:
        check_multiple("--context", context, f"--chunks {count} times --page", count * page)
    check_least("--context", context, max(counts) * page)
    return PagesSettings(context, counts, page, check_device(device))


def run(settings: PagesSettings, command: str, console: Console) -> dict[str, Any]:
    """Measure and print.

    Args:
        settings: what to measure.
        command: the command line, for the record.
        console: where tables go.

    Returns:
        A JSON-ready report.

    Raises:
        InputError: the text is shorter than the context.
    """
    ids = _tokens(settings)
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32)
    model.to(settings.device)
    facts = machine_facts(settings.device)
    where = facts["gpu"] or facts["machine"]
    console.print(f"oomb bench pages on {where}, torch {facts['torch']}", markup=False)
    console.print(HOW, markup=False)
    rows = []
    for count in settings.chunks:
        exact = _step(model, ids, settings, count)
        rows += [
            {
                "chunks": count,
                "option": name,
                **_errors(_step(model, ids, settings, count, low), exact),
            }
            for name, low in OPTIONS.items()
        ]
    report = {
        **facts,
        "command": command,
        "how": HOW,
        "settings": {"context": settings.context, "page": settings.page, "dtype": "fp32"},
        "rows": rows,
    }
    _show(report, console)
    return report


@dataclass(frozen=True)
class _Step:
    """Gradients of one step, each flat: of parameters by group, and of pages; bytes per token."""

    loss: float
    parameters: dict[str, torch.Tensor]
    pages: dict[str, torch.Tensor]
    page_bytes: float


def _tokens(settings: PagesSettings) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    found = tokenizer(demo_text("finetune"), add_special_tokens=False, verbose=False)["input_ids"]
    if len(found) < settings.context:
        raise InputError(
            f"--context must be at most the text's {len(found)} tokens, got {settings.context}."
        )
    return torch.tensor([found[: settings.context]], device=settings.device)


def _step(
    model: PreTrainedModel,
    ids: torch.Tensor,
    settings: PagesSettings,
    count: int,
    low: dict[str, Any] | None = None,
) -> _Step:
    chunk = settings.context // count
    config = oomb.EngineConfig(
        chunk_size=chunk, page_size=settings.page, activation_policy="keep", **(low or {})
    )
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    with oomb.Engine(model, config) as engine, _page_gradients(model) as pages:
        steps = engine.iter_step(ids)
        alive, swept = {}, 0
        while True:
            try:
                state = next(steps)
            except StopIteration as end:
                loss = float(end.value.loss)
                break
            if state.phase == "sweep" and not swept:  # every page, and every page's gradient
                alive = state.bytes_alive
            swept += state.phase == "sweep"
    named = [(name, p.grad.flatten()) for name, p in model.named_parameters() if p.grad is not None]
    parameters = {
        group: torch.cat([grad for name, grad in named if word in name])
        for group, word in GROUPS.items()
    }
    parameters["all"] = torch.cat([grad for _, grad in named])
    page_bytes = alive["kv_pages"] + alive["page_gradients"]
    return _Step(loss, parameters, pages, page_bytes / (settings.context - chunk))


@contextmanager
def _page_gradients(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """Collects a step's gradients of what K and V are made from, less the last chunk's.

    Between the projection and a page lies only RoPE, a rotation: it changes no length and no angle.
    """
    found: dict[str, dict[str, list[torch.Tensor]]] = {name: {} for name in PAGES}
    handles = []

    def watch(kind: str, name: str):
        chunks = found[kind].setdefault(name, [])

        def collect(_module: torch.nn.Module, _inputs: Any, out: torch.Tensor) -> None:
            if out.requires_grad:
                out.register_hook(lambda grad: chunks.append(grad.flatten()))

        return collect

    for kind, word in PAGES.items():
        for name, module in model.named_modules():
            if name.endswith(word):
                handles.append(module.register_forward_hook(watch(kind, name)))
    pages: dict[str, torch.Tensor] = {}
    try:
        yield pages
    finally:
        for handle in handles:
            handle.remove()
    for kind, layers in found.items():  # the sweep comes from the end
        pages[kind] = torch.cat([grad for chunks in layers.values() for grad in chunks[1:]])


def _errors(low: _Step, exact: _Step) -> dict[str, Any]:
    return {
        "loss": low.loss,
        "loss_full": exact.loss,
        "page_bytes_per_token": low.page_bytes,
        "page_bytes_per_token_full": exact.page_bytes,
        "parameters": _compare(low.parameters, exact.parameters),
        "page_gradients": _compare(low.pages, exact.pages),
    }


def _compare(
    low: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> dict[str, dict[str, float]]:
    found = {}
    for name, b in exact.items():
        a, b = low[name].double(), b.double()
        error, cosine = (a - b).norm() / b.norm(), a @ b / (a.norm() * b.norm())
        found[name] = {"error": float(error), "cosine": float(cosine)}
    return found


def _show(report: dict[str, Any], console: Console) -> None:
    groups: Sequence[str] = [*report["rows"][0]["parameters"]]
    pages: Sequence[str] = [*report["rows"][0]["page_gradients"]]
    for what, said in (("error", "relative error"), ("cosine", "1 - cosine")):
        table = Table(box=box.SIMPLE_HEAD, title=f"{said} of the gradient of", title_justify="left")
        for name in (
            "option",
            "chunks",
            "bytes/token",
            *groups,
            *(f"pages' {each}" for each in pages),
        ):
            table.add_column(name, justify="left" if name == "option" else "right")
        for row in sorted(report["rows"], key=lambda row: [*OPTIONS].index(row["option"])):
            saved = f"{row['page_bytes_per_token']:,.0f} of {row['page_bytes_per_token_full']:,.0f}"
            figures = [row["parameters"][name][what] for name in groups]
            figures += [row["page_gradients"][name][what] for name in pages]
            figures = figures if what == "error" else [1 - figure for figure in figures]
            shown = [f"{figure:.1e}" for figure in figures]
            table.add_row(row["option"], str(row["chunks"]), saved, *shown)
        console.print(table)
