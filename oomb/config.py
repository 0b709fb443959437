"""Engine settings: one frozen dataclass, checked when it is made."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

import torch

AttentionBackendName = Literal["auto", "library", "triton", "reference"]
Accumulate = Literal["owner", "atomic"]
ActivationPolicy = Literal["keep", "selective", "layer"]
FusedKernels = Literal["auto", "off"]
PageDtype = Literal["fp8"]
Rounding = Literal["stochastic", "nearest"]
Summary = Literal["mean", "minmax"]
Granularity = Literal["query_page", "chunk"]
SelectionHeads = Literal["shared", "kv_head"]

ATTENTION_BACKENDS = ("auto", "library", "triton", "reference")
ACCUMULATES = ("owner", "atomic")
ACTIVATION_POLICIES = ("keep", "selective", "layer")
FUSED_KERNELS = ("auto", "off")
PAGE_DTYPES = (None, "fp8")
ROUNDINGS = ("stochastic", "nearest")
SUMMARIES = ("mean", "minmax")
GRANULARITIES = ("query_page", "chunk")
SELECTION_HEADS = ("shared", "kv_head")
GRADIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where pages live that the GPU has no room for: in host memory, moved behind the computation.

    Attributes:
        gpu_budget: bytes of GPU memory for pages, their gradients and the ring; the earliest pages,
            which are read most, stay there. 0 keeps none: the least memory. `auto` takes what the
            GPU has left when a step begins, by the plan of `oomb plan`; on a CPU it is 0.
        host_budget: bytes of host memory at most; None takes up to what the system says is spare.
        ring_depth: GPU buffers of one segment each; one is computed with while others are copied.
        fill_outputs: outputs that `keep_fill_outputs` keeps go to the host too.
        pinned: register host memory with CUDA, so that copies run beside the kernels. Takes about
            half a second per GiB, once.
        poison: fill every buffer that is let go with NaN, so that a use of it shows. For tests.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that cannot work; the message says what would.
    """

    gpu_budget: int | Literal["auto"] = 0
    host_budget: int | None = None
    ring_depth: int = 3
    fill_outputs: bool = True
    pinned: bool = True
    poison: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.gpu_budget, str) and self.gpu_budget != "auto":
            raise ValueError(f"gpu_budget must be 'auto' or bytes, got {self.gpu_budget!r}")
        if not isinstance(self.gpu_budget, str):
            object.__setattr__(self, "gpu_budget", _int("gpu_budget", self.gpu_budget, least=0))
        object.__setattr__(self, "ring_depth", _int("ring_depth", self.ring_depth, least=2))
        if self.host_budget is not None:
            object.__setattr__(self, "host_budget", _int("host_budget", self.host_budget, least=1))
        _booleans(self, "fill_outputs", "pinned", "poison")


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """Which pages of history a query page reads; its own chunk it reads whole.

    Choosing is an approximation of attention, and has no gradient of its own: attention over the
    chosen pages does, exactly. Where history has no more pages than the budget, attention is dense.
    Layers that are local by design read their windows as before.

    Attributes:
        budget: pages read by each query page (K), kept ones included. Tokens of history that do not
            fill a page, less than one page at its end, are read beside them.
        summary: what stands for a page: `mean` is the mean of its keys, `minmax` an upper bound of
            the score of every key in it, from the largest and smallest number in each dimension.
        granularity: `query_page` chooses for every page of queries, `chunk` once for a whole chunk.
        heads: `shared` chooses one set of pages for all heads, `kv_head` one for each key/value
            head.
        keep_first: pages at the beginning of a document that are always read.
        keep_recent: pages just before the chunk that are always read.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that cannot work; the message says what would.
    """

    budget: int = 64
    summary: Summary = "mean"
    granularity: Granularity = "query_page"
    heads: SelectionHeads = "shared"
    keep_first: int = 0
    keep_recent: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", _int("budget", self.budget))
        for name in ("keep_first", "keep_recent"):
            object.__setattr__(self, name, _int(name, getattr(self, name), least=0))
        _one_of("summary", self.summary, SUMMARIES)
        _one_of("granularity", self.granularity, GRANULARITIES)
        _one_of("heads", self.heads, SELECTION_HEADS)
        if self.keep_first + self.keep_recent > self.budget:
            raise ValueError(
                f"keep_first + keep_recent must be at most budget={self.budget}, got "
                f"{self.keep_first} + {self.keep_recent}; keep fewer pages or raise the budget"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine cuts, stores and computes a sequence.

    Attributes:
        chunk_size: tokens computed at once (C). Activations are alive for
            `live_chunks` of them only.
        page_size: tokens of one layer's K and V stored together (P). Must divide `chunk_size`.
        segment_pages: consecutive pages stored and attended together; None takes whole chunks, up
            to 32,768 tokens, of a length that leaves little of the last segment empty.
        attention_backend: `library` is the vendor's kernels (cuDNN on CUDA, flash attention on a
            CPU), `triton` reads pages wherever they lie and masks windows and documents itself (on
            CUDA), `reference` is plain PyTorch, `auto` picks one and says which.
        accumulate: how `triton` adds to page gradients: `owner` gives each page slice to one
            program, in the same order on every run; `atomic` scatters, in any order.
        activation_policy: what a chunk keeps between forward and backward: `keep` everything,
            `selective` each layer's input and attention output, `layer` each layer's input only.
            The rest is computed again.
        live_chunks: how many chunks' activations may be alive at once. The last of a sequence go
            from their only forward straight to their backward; all others run forward twice. More
            than 1 is faster on short sequences, and needs `activation_policy='keep'`.
        keep_fill_outputs: the fill keeps each layer's attention output and log-sum-exp, and the
            sweep takes them instead of running attention forward again. Costs as many bytes per
            token as a hidden state, for every layer, until the token's chunk is swept.
        offload: where pages live that the GPU has no room for; None keeps all on the model's
            device. On a CPU the second tier is simulated.
        sparse: layers that are not local by design read only pages of history that each query page
            chooses; None reads all. An approximation, which the gradients are those of.
        fused_kernels: `auto` computes cross entropy, and where liger-kernel is installed RMSNorm,
            SwiGLU and RoPE, by fused kernels on CUDA; each only if it proved as exact as the
            model's own code when the engine was attached (`Engine.fused_kernels` tells). `off`
            leaves everything to the model.
        grad_dtype: dtype of parameters' `.grad`, or the parameter's own dtype where that is wider.
            torch's Adam optimizers want the parameter's own; a bf16 sum loses more the more chunks
            there are.
        page_dtype: `fp8` keeps K and V in pages as 8-bit floats (e4m3), with a scale per page and
            head, rounded once, when they are written. A chunk attends to earlier chunks as their
            pages hold them, in both passes, and to itself in full precision; gradients pass the
            rounding straight through. None keeps K and V as the model makes them.
        page_grad_dtype: dtype in which page gradients accumulate, or the model's own dtype where
            that is wider; bf16 is bf16 for every model.
        page_grad_rounding: how a sum of page gradients becomes bf16 after each chunk: `stochastic`
            is right on average, `nearest` leaves additions to the attention kernel, but loses terms
            that are small beside their sum. The random numbers are drawn apart from the model's,
            from torch's seed and the step's number.
        deterministic: use only kernels that give the same bits on every run, and wherever pages
            live, or refuse.
        check_replay: compare every K and V that the sweep computes again with its page, bit for
            bit.
        restore_grads: accumulate beside existing gradients and add at the end, so that a step that
            raises leaves them as they were. Costs a second gradient buffer for parameters that
            hold one.
        recorder: an object with `on_event(event)`; it receives every `oomb.profiling.Event` of the
            engine.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that cannot work; the message says what would.
    """

    chunk_size: int = 4096
    page_size: int = 128
    segment_pages: int | None = None
    attention_backend: AttentionBackendName = "auto"
    accumulate: Accumulate = "owner"
    activation_policy: ActivationPolicy = "selective"
    live_chunks: int = 1
    keep_fill_outputs: bool = False
    offload: OffloadConfig | None = None
    sparse: SparseConfig | None = None
    fused_kernels: FusedKernels = "auto"
    grad_dtype: torch.dtype = torch.float32
    page_dtype: PageDtype | None = None
    page_grad_dtype: torch.dtype = torch.float32
    page_grad_rounding: Rounding = "stochastic"
    deterministic: bool = False
    check_replay: bool = False
    restore_grads: bool = False
    recorder: Any | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_size", "page_size", "live_chunks"):
            object.__setattr__(self, name, _int(name, getattr(self, name)))
        if self.segment_pages is not None:
            object.__setattr__(self, "segment_pages", _int("segment_pages", self.segment_pages))
        if self.chunk_size % self.page_size:
            raise ValueError(
                f"chunk_size must be a multiple of page_size, got chunk_size={self.chunk_size} and "
                f"page_size={self.page_size}; {_nearest_multiples(self.chunk_size, self.page_size)}"
            )
        _one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _one_of("accumulate", self.accumulate, ACCUMULATES)
        _one_of("activation_policy", self.activation_policy, ACTIVATION_POLICIES)
        _one_of("fused_kernels", self.fused_kernels, FUSED_KERNELS)
        _one_of("grad_dtype", self.grad_dtype, GRADIENT_DTYPES)
        _one_of("page_dtype", self.page_dtype, PAGE_DTYPES)
        _one_of("page_grad_dtype", self.page_grad_dtype, GRADIENT_DTYPES)
        _one_of("page_grad_rounding", self.page_grad_rounding, ROUNDINGS)
        if self.live_chunks > 1 and self.activation_policy != "keep":
            raise ValueError(
                f"live_chunks={self.live_chunks} keeps whole chunks alive, but "
                f"activation_policy={self.activation_policy!r} drops parts of them; use "
                "activation_policy='keep' or live_chunks=1"
            )
        _booleans(self, "keep_fill_outputs", "deterministic", "check_replay", "restore_grads")
        if self.offload is not None and not isinstance(self.offload, OffloadConfig):
            raise TypeError(
                f"offload must be an oomb.OffloadConfig or None, got {type(self.offload).__name__}"
            )
        if self.sparse is not None:
            self._check_sparse()
        if self.recorder is not None and not callable(getattr(self.recorder, "on_event", None)):
            raise TypeError(
                f"recorder must have a method on_event(event), got {type(self.recorder).__name__}"
            )

    def _check_sparse(self) -> None:
        if not isinstance(self.sparse, SparseConfig):
            raise TypeError(
                f"sparse must be an oomb.SparseConfig or None, got {type(self.sparse).__name__}"
            )
        for given, instead, unsupported in (
            (f"offload={self.offload}", "offload=None", self.offload is not None),
            (f"page_dtype={self.page_dtype!r}", "page_dtype=None", self.page_dtype is not None),
            (
                "page_grad_rounding='stochastic'",
                "page_grad_rounding='nearest'",
                self.rounds_stochastically,
            ),
        ):
            if unsupported:
                raise ValueError(
                    f"sparse attention takes pages from where they were written, and does not work "
                    f"with {given} yet; use {instead} or sparse=None"
                )

    @property
    def rounds_stochastically(self) -> bool:
        """Whether page gradients are rounded by `page_grad_rounding`, and stochastically."""
        low = self.page_grad_dtype == torch.bfloat16
        return low and self.page_grad_rounding == "stochastic"


def _int(name: str, value: Any, least: int = 1) -> int:
    kind = "a positive integer" if least == 1 else f"an integer of {least} or more"
    if isinstance(value, bool | torch.Tensor):
        raise TypeError(f"{name} must be {kind}, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {kind}, got {value!r} ({type(value).__name__})") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def _booleans(config: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise TypeError(f"{name} must be True or False, got {getattr(config, name)!r}")


def _one_of(name: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def _nearest_multiples(size: int, step: int) -> str:
    below = size // step * step
    if below:
        return f"use chunk_size={below} or {below + step}"
    return f"use chunk_size={step}, or a page_size that divides {size}"
