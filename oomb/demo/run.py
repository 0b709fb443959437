"""The main job, once: fine-tune over a long context by chunks, and compare with the whole run."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import oomb
from oomb.demo import compare
from oomb.demo.inputs import DemoInputs, InputError
from oomb.demo.report import Progress, without_infinities
from oomb.profiling import LiveBytes, Recorder

GRADIENT_LIMIT = 1e-5


def run(inputs: DemoInputs, progress: Progress) -> dict[str, Any]:
    """Do everything `oomb demo` reports, and write its recording.

    The first step's gradients are compared with those of the whole run at the same weights on the
    same tokens; then every step trains. TF32 is off meanwhile.

    Args:
        inputs: options, model and text.
        progress: told of every stage.

    Returns:
        The figures, as `--json` writes them.

    Raises:
        InputError: the engine refuses the model; nothing has been computed.
    """
    options = inputs.options
    recorder = Recorder()
    config = oomb.EngineConfig(chunk_size=options.chunk, page_size=options.page, recorder=recorder)
    began = time.perf_counter()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with _engine(inputs.model, config) as engine:
            figures = _measure(inputs, engine, progress)
    finally:
        torch.set_float32_matmul_precision(precision)
    figures["seconds"]["total"] = time.perf_counter() - began
    recorder.notes = {"made_by": "oomb demo", **without_infinities(figures)}
    recorder.save(options.out)
    return figures | {"recording": str(options.out)}


def _engine(model: Any, config: oomb.EngineConfig) -> oomb.Engine:
    try:
        return oomb.Engine(model, config)
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error


@dataclass(frozen=True)
class _Step:
    """One forward and backward, in either way: its loss, live bytes and seconds."""

    loss: float
    bytes: dict[str, int]
    seconds: float


def _measure(inputs: DemoInputs, engine: oomb.Engine, progress: Progress) -> dict[str, Any]:
    options, model, device = inputs.options, inputs.model, inputs.device
    train, held_out = inputs.train.to(device), inputs.held_out.to(device)
    window = train[None, : options.context]

    progress.stage("How long a run fits in memory whole")
    need = compare.whole_run_need(model, train)
    free = compare.memory_free(device)
    length = compare.longest_that_fits(need, options.context, free)
    extra = 0 if length == options.context else 4 * length
    progress.plan(2 * len(held_out) + 3 * length + extra + 4 * options.context * options.steps)

    progress.stage(f"Loss on {inputs.held_out_name}, before", work=len(held_out))
    before = float(engine.evaluate(held_out[None]))

    progress.stage(f"Ordinary training step, {length:,} tokens whole", work=3 * length)
    whole = _whole_step(model, window[:, :length])
    reference = compare.gradients(model)
    chunked = _chunked_step(
        model,
        engine,
        window[:, :length],
        progress,
        "The same step by chunks",
        count_bytes=True,
    )
    differences = compare.relative_differences(compare.gradients(model), reference)
    del reference

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    starts = range(0, len(train) - options.context + 1, options.context)
    steps = []
    for i in range(options.steps):
        start = starts[i % len(starts)]
        if i == 0 and length == options.context:
            steps.append(chunked)  # its gradients are in place: the first step is done
        else:
            ids = train[None, start : start + options.context]
            title = f"Training, step {i + 1} of {options.steps}"
            count = not steps
            steps.append(_chunked_step(model, engine, ids, progress, title, count_bytes=count))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    progress.stage(f"Loss on {inputs.held_out_name}, after", work=len(held_out))
    after = float(engine.evaluate(held_out[None]))
    progress.stage("Done")

    worst = max(differences, key=differences.__getitem__)
    return {
        "oomb": oomb.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "model": {
            "class": type(model).__name__,
            "path": str(options.model) if options.model else "shipped",
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": "float32",
        },
        "text": {"train": inputs.train_name, "held_out": inputs.held_out_name},
        "context": options.context,
        "chunk": options.chunk,
        "page": options.page,
        "steps": options.steps,
        "lr": options.lr,
        "held_out": {"tokens": len(held_out), "loss_before": before, "loss_after": after},
        "train_losses": [step.loss for step in steps],
        "gradients": {
            "length": length,
            "parameters": len(differences),
            "largest_relative_difference": differences[worst],
            "of": worst,
            "limit": GRADIENT_LIMIT,
            "within_limit": differences[worst] <= GRADIENT_LIMIT,
            "loss_whole": whole.loss,
            "loss_by_chunks": chunked.loss,
            "by_parameter": dict(sorted(differences.items())),
        },
        "live_bytes": {
            "free": free,
            "whole": {"length": length, **whole.bytes},
            "whole_at_context_estimate": need(options.context),
            "by_chunks": {"length": options.context, **steps[0].bytes},
        },
        "seconds": {"whole": whole.seconds, "by_chunks": [step.seconds for step in steps]},
    }


def _whole_step(model: Any, ids: torch.Tensor) -> _Step:
    compare.zero_gradients(model)
    began = time.perf_counter()
    with LiveBytes() as live:
        loss = compare.whole_run(model, ids)
    return _Step(loss, _bytes(live), time.perf_counter() - began)


def _chunked_step(
    model: Any,
    engine: oomb.Engine,
    ids: torch.Tensor,
    progress: Progress,
    title: str,
    *,
    count_bytes: bool = False,
) -> _Step:
    """One engine step on ids [1, N] from gradients of zero, moving the bar at each chunk.

    Counting bytes costs this way more time than the whole run, which has fewer operators.
    """
    compare.zero_gradients(model)
    progress.stage(title, work=4 * ids.shape[1])
    live = LiveBytes()
    began = time.perf_counter()
    with live if count_bytes else nullcontext():
        chunks = engine.iter_step(ids)
        while True:
            try:
                state = next(chunks)
            except StopIteration as end:
                loss = float(end.value.loss)
                break
            where = f"{state.phase}, chunk {state.chunk + 1} of {state.num_chunks}"
            # A chunk of the sweep runs forward and backward: three times the fill's work.
            work = (1 if state.phase == "fill" else 3) * ids.shape[1] // state.num_chunks
            progress.advance(work, f"{title}: {where}")
    return _Step(loss, _bytes(live), time.perf_counter() - began)


def _bytes(live: LiveBytes) -> dict[str, int]:
    return {
        "activations": live.peak,
        "kv_pages": live.peak_by["kv_pages"],
        "page_gradients": live.peak_by["page_gradients"],
    }
