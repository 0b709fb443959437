"""One side in a process of its own: `python -m oomb.bench.step.child SIDE SETTINGS RESULTS`.

Liger changes transformers for a whole process, and a process takes its memory with it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from oomb.bench.inputs import DTYPES
from oomb.bench.machine import machine_facts
from oomb.bench.step.flops import useful
from oomb.bench.step.measure import clear, measure_length, record_step, token_ids
from oomb.bench.step.options import StepSettings
from oomb.bench.step.roofline import rates_of
from oomb.bench.step.sample import sample_length
from oomb.bench.step.sides import OURS, SIDES, OurSide, Side

OUT_OF_MEMORY = "out of memory"


def main(arguments: list[str]) -> None:
    """Measure one side at every length; each line of the results file is a JSON object."""
    name, text, path = arguments
    settings = StepSettings(**json.loads(text))
    device = torch.device(settings.device)
    with Path(path).open("a") as results:

        def write(row: dict[str, Any]) -> None:
            results.write(json.dumps(row) + "\n")
            results.flush()

        write({"machine": machine_facts(device)})
        if name == OURS:  # one of the two is enough
            write({"rates": asdict(rates_of(device, DTYPES[settings.dtype]))})
        try:
            side = SIDES[name](settings)
        except torch.OutOfMemoryError:
            for tokens in settings.lengths:
                write({"tokens": tokens, "failed": OUT_OF_MEMORY})
            return
        except ValueError as error:  # the engine refuses these settings on this device
            write({"refused": str(error)})
            return
        write({"facts": side.facts})
        for tokens in settings.lengths:
            figures = _measure(side, tokens, settings)
            write({"tokens": tokens, **figures})
            rate = figures.get("tokens_per_s")
            said = figures["failed"] if rate is None else f"{rate:,.0f} tokens/s"
            print(f"  {name}, {tokens:,} tokens: {said}", flush=True)


def _measure(side: Side, tokens: int, settings: StepSettings) -> dict[str, Any]:
    device = torch.device(settings.device)
    try:
        if settings.sample:
            clear(side)
            ids = token_ids(side, tokens, device)
            figures = sample_length(side, ids, record=settings.record)
        else:
            figures = measure_length(
                side,
                tokens,
                device=device,
                seconds=settings.seconds,
                warmup=settings.warmup,
                split=settings.device == "cuda" and tokens <= settings.split,
            )
            if settings.record and isinstance(side, OurSide):
                figures["recorded"] = record_step(side, token_ids(side, tokens, device))
        if isinstance(side, OurSide):
            plan = side.planned(tokens)
            figures["planned_gib"] = plan.gpu_peak / 2**30
            figures["planned_host_gib"] = plan.host_total / 2**30
    except torch.OutOfMemoryError:
        return {"failed": OUT_OF_MEMORY}
    return {
        **figures,
        "computed_flops": asdict(side.computed(tokens)),
        "useful_flops": asdict(useful(settings.sizes(), tokens)),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
