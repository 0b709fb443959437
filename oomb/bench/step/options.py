"""What `oomb bench step` is asked to measure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen2Config

import oomb
from oomb.bench.inputs import (
    DTYPES,
    PAGE_DTYPES,
    InputError,
    check_device,
    check_least,
    check_multiple,
    check_out,
    choose,
    numbers,
)
from oomb.bench.models import SHAPES
from oomb.bench.step.flops import LayerSizes
from oomb.config import ROUNDINGS

DEFAULTS = {
    "cuda": {"lengths": "16384,32768", "chunk": 4096, "page": 128, "dtype": "bf16"},
    "cpu": {"lengths": "256,512", "chunk": 64, "page": 16, "dtype": "fp32"},
}
GIB = 2**30
GRAD_DTYPES = ("bf16", "fp16", "fp32", "fp64")


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The command line; sizes are in tokens, None is the device's default."""

    shape: str = "qwen2-7b"
    layers: int | None = None
    lengths: str | None = None
    chunk: int | None = None
    page: int | None = None
    policy: str = "selective"
    grad_dtype: str = "fp32"
    page_dtype: str = "model"
    page_grad_dtype: str = "fp32"
    page_grad_rounding: str = "stochastic"
    live_chunks: int = 1
    keep_fill_outputs: bool = False
    offload: bool = False
    gpu_budget: float = 0.0
    ring_depth: int = 3
    backend: str = "auto"
    accumulate: str = "owner"
    liger: bool = True
    sample: bool = False
    record: bool = False
    seconds: float = 10.0
    warmup: bool = True
    split: int = 32768
    device: str = "auto"
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Options that were checked, with every default filled in; both sides read the same.

    Attributes:
        shape: name of the model shape.
        layers: decoder layers.
        lengths: tokens of each step.
        chunk, page: tokens.
        policy: activation policy of the engine.
        dtype: of the model.
        grad_dtype, page_dtype, page_grad_dtype, page_grad_rounding: of the engine.
        live_chunks, keep_fill_outputs: of the engine.
        offload: whether pages may live on the host.
        gpu_budget, ring_depth: of the engine's offloading; the budget in GiB.
        backend: attention backend of the engine.
        accumulate: how the backend `triton` adds to page gradients.
        liger: whether both sides use Liger's kernels.
        sample: whether the engine's time is estimated from sampled chunks.
        record: whether one more of the engine's steps is recorded.
        seconds: measured time that steps are repeated for.
        warmup: whether an unmeasured step goes before each length.
        split: longest step that is run once more under the profiler; 0 for none.
        device: cpu or cuda.
    """

    shape: str
    layers: int
    lengths: list[int]
    chunk: int
    page: int
    policy: str
    dtype: str
    grad_dtype: str
    page_dtype: str
    page_grad_dtype: str
    page_grad_rounding: str
    live_chunks: int
    keep_fill_outputs: bool
    offload: bool
    gpu_budget: float
    ring_depth: int
    backend: str
    accumulate: str
    liger: bool
    sample: bool
    record: bool
    seconds: float
    warmup: bool
    split: int
    device: str

    def engine_config(self) -> oomb.EngineConfig:
        """The engine's settings."""
        return oomb.EngineConfig(
            chunk_size=self.chunk,
            page_size=self.page,
            activation_policy=self.policy,
            grad_dtype=DTYPES[self.grad_dtype],
            page_dtype=PAGE_DTYPES[self.page_dtype],
            page_grad_dtype=DTYPES[self.page_grad_dtype],
            page_grad_rounding=self.page_grad_rounding,
            live_chunks=self.live_chunks,
            keep_fill_outputs=self.keep_fill_outputs,
            offload=self._offload(),
            attention_backend=self.backend,
            accumulate=self.accumulate,
            fused_kernels="auto" if self.liger else "off",
        )

    def _offload(self) -> oomb.OffloadConfig | None:
        if not self.offload:
            return None
        budget = round(self.gpu_budget * GIB)
        return oomb.OffloadConfig(gpu_budget=budget, ring_depth=self.ring_depth)

    def sizes(self) -> LayerSizes:
        """What FLOPs are counted from."""
        config = Qwen2Config(**SHAPES[self.shape])
        return LayerSizes(
            layers=self.layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            vocab=config.vocab_size,
        )

    def plain(self) -> dict[str, Any]:
        """As JSON takes it; `StepSettings(**plain)` is the same again."""
        return asdict(self)


def check(options: StepOptions) -> StepSettings:
    """Check `options` before any work.

    Args:
        options: the command line.

    Returns:
        What to measure.

    Raises:
        InputError: an option cannot be used.
    """
    device = check_device(options.device).type
    check_out(options.out)
    shape = choose("--shape", options.shape, SHAPES)
    if device == "cpu" and shape != "tiny":
        raise InputError(f"--shape {shape} needs a CUDA GPU: on a CPU use --shape tiny.")
    defaults = DEFAULTS[device]
    layers = SHAPES[shape]["num_hidden_layers"] if options.layers is None else options.layers
    check_least("--layers", layers, 1)
    lengths = numbers("--lengths", options.lengths or defaults["lengths"], least=2)
    lengths = list(dict.fromkeys(lengths))
    if not lengths:
        raise InputError("--lengths must name at least one length, such as 16384,32768.")
    check_least("--seconds", options.seconds, 0)
    check_least("--split", options.split, 0)
    settings = StepSettings(
        shape=shape,
        layers=layers,
        lengths=lengths,
        chunk=defaults["chunk"] if options.chunk is None else options.chunk,
        page=defaults["page"] if options.page is None else options.page,
        policy=options.policy,
        dtype=defaults["dtype"],
        grad_dtype=choose("--grad-dtype", options.grad_dtype, GRAD_DTYPES),
        page_dtype=choose("--page-dtype", options.page_dtype, PAGE_DTYPES),
        page_grad_dtype=choose("--page-grad-dtype", options.page_grad_dtype, GRAD_DTYPES),
        page_grad_rounding=choose("--page-grad-rounding", options.page_grad_rounding, ROUNDINGS),
        live_chunks=options.live_chunks,
        keep_fill_outputs=options.keep_fill_outputs,
        offload=options.offload,
        gpu_budget=options.gpu_budget,
        ring_depth=options.ring_depth,
        backend=options.backend,
        accumulate=options.accumulate,
        liger=options.liger,
        sample=options.sample,
        record=options.record,
        seconds=options.seconds,
        warmup=options.warmup,
        split=options.split,
        device=device,
    )
    if not settings.offload and settings.gpu_budget:
        raise InputError(
            f"--gpu-budget {settings.gpu_budget:g} says what stays on the GPU with --offload: add "
            "--offload, or leave it out."
        )
    try:
        settings.engine_config()
    except ValueError as error:
        raise InputError(f"These settings make no engine: {error}.") from error
    if settings.sample and settings.live_chunks > 1:
        raise InputError(
            f"--sample runs chunks by themselves, but --live-chunks {settings.live_chunks} keeps "
            "several alive: use --live-chunks 1, or leave --sample out."
        )
    if settings.sample:
        for tokens in lengths:
            check_multiple("--lengths", tokens, "--chunk", settings.chunk)
    return settings
