"""What `oomb plan` is asked: checked, and looked up on this machine where nothing was said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import oomb
from oomb.bench.inputs import (
    DTYPES,
    PAGE_DTYPES,
    InputError,
    check_least,
    choose,
    one_sentence,
)
from oomb.bench.models import QWEN2_7B
from oomb.config import ROUNDINGS
from oomb.meminfo import meminfo
from oomb.planner.memory import GIB, OPTIMIZERS, Machine
from oomb.planner.model import ModelSizes

MOST_GIB = 1_000_000
NAMED = "qwen2-7b"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The command line; sizes of memory in GiB, None is this machine's."""

    model: str = NAMED
    context: int = 262144
    chunk: int = 4096
    page: int = 128
    dtype: str = "bf16"
    policy: str = "selective"
    grad_dtype: str = "fp32"
    page_dtype: str = "model"
    page_grad_dtype: str = "fp32"
    page_grad_rounding: str = "stochastic"
    live_chunks: int = 1
    keep_fill_outputs: bool = False
    offload: bool = False
    gpu_budget: float = 0.0
    optimizer: str = "none"
    gpu: float | None = None
    host: float | None = None


def check(options: PlanOptions) -> tuple[ModelSizes, oomb.EngineConfig, Machine]:
    """Check `options` before any work.

    Args:
        options: the command line.

    Returns:
        Sizes of the model, settings of the engine, and the machine.

    Raises:
        InputError: an option cannot be used.
    """
    check_least("--context", options.context, 1)
    check_least("--gpu-budget", options.gpu_budget, 0)
    if options.gpu_budget > MOST_GIB:
        raise InputError(f"--gpu-budget must be at most {MOST_GIB}, got {options.gpu_budget}.")
    choose("--optimizer", options.optimizer, OPTIMIZERS)
    if options.gpu_budget and not options.offload:
        raise InputError("--gpu-budget says what stays on the GPU with --offload: add --offload.")
    dtypes = [
        DTYPES[choose(f"--{name.replace('_', '-')}", getattr(options, name), DTYPES)]
        for name in ("dtype", "grad_dtype", "page_grad_dtype")
    ]
    page_dtype = PAGE_DTYPES[choose("--page-dtype", options.page_dtype, PAGE_DTYPES)]
    choose("--page-grad-rounding", options.page_grad_rounding, ROUNDINGS)
    machine = _machine(options)
    try:
        offload = oomb.OffloadConfig(gpu_budget=round(options.gpu_budget * GIB))
        config = oomb.EngineConfig(
            chunk_size=options.chunk,
            page_size=options.page,
            activation_policy=options.policy,
            grad_dtype=dtypes[1],
            page_dtype=page_dtype,
            page_grad_dtype=dtypes[2],
            page_grad_rounding=options.page_grad_rounding,
            live_chunks=options.live_chunks,
            keep_fill_outputs=options.keep_fill_outputs,
            offload=offload if options.offload else None,
        )
    except ValueError as error:
        raise InputError(f"These settings make no engine: {error}.") from error
    model = _model_config(options.model)
    try:
        sizes = ModelSizes.of(model, dtypes[0])
    except Exception as error:  # transformers raises anything for what is no causal language model
        said = f"{type(error).__name__}: {one_sentence(error)}"
        raise InputError(
            f"{options.model} is no causal language model that can be sized: {said}"
        ) from error
    return sizes, config, machine


def _model_config(model: str):
    from transformers import AutoConfig, Qwen2Config

    if model == NAMED:
        return Qwen2Config(**QWEN2_7B)
    if not (Path(model) / "config.json").is_file():
        raise InputError(
            f"The model must be {NAMED} or a folder with a config.json, {model!r} is neither."
        )
    try:
        return AutoConfig.from_pretrained(model)
    except Exception as error:  # whatever a broken file makes transformers raise
        raise InputError(f"{model}/config.json cannot be read: {one_sentence(error)}") from error


def _machine(options: PlanOptions) -> Machine:
    for flag, given in (("--gpu", options.gpu), ("--host", options.host)):
        if given is not None and not 0 < given <= MOST_GIB:
            raise InputError(f"{flag} must be more than 0 GiB and at most {MOST_GIB}, got {given}.")
    if options.gpu is not None:
        name, gpu = f"a GPU of {options.gpu:g} GiB", round(options.gpu * GIB)
    elif torch.cuda.is_available():
        name, gpu = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
    else:
        raise InputError("There is no GPU here: say how much memory it has, such as --gpu 80.")
    host = _host_bytes() if options.host is None else round(options.host * GIB)
    return Machine(name, gpu, host)


def _host_bytes() -> int:
    total = meminfo("MemTotal")
    if total is None:
        raise InputError("This system does not say how much memory it has: give --host.")
    return total
