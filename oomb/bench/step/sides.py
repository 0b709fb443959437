"""The two ways of running a step: OOMB's engine, and transformers as people tune it."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

import oomb
from oomb.bench.inputs import DTYPES
from oomb.bench.models import SHAPES, make_model
from oomb.bench.step.flops import StepFlops, checkpointed, chunked
from oomb.bench.step.options import StepSettings
from oomb.planner import ModelSizes, Plan, plan_step
from oomb.profiling import Recorder

OURS, THEIRS = "oomb", "transformers"


class Side(Protocol):
    """One way of running a step.

    Attributes:
        model: holds the gradients.
        facts: how it runs, beyond the settings.
    """

    model: PreTrainedModel
    facts: dict[str, Any]

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        """Forward and backward over ids [1, N]; returns the loss."""

    def reserve(self, tokens: int) -> None:
        """Take what a step of so many tokens needs before it is timed."""

    def host_bytes(self) -> int:
        """Host memory held for pages."""

    def computed(self, tokens: int) -> StepFlops:
        """Operations of a step."""


class OurSide:
    """One engine on an unpatched model."""

    def __init__(self, settings: StepSettings) -> None:
        self._settings = settings
        self.model = _model(settings)
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("oomb").setLevel(logging.INFO)  # why a kernel is not used
        self.engine = oomb.Engine(self.model, settings.engine_config())
        self.facts = {
            "attention": self.engine.attention_backend,
            "fused_kernels": list(self.engine.fused_kernels),
        }

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Side`."""
        return self.engine.step(ids).loss

    def reserve(self, tokens: int) -> None:
        """See `Side`."""
        self.engine.reserve(tokens)

    def host_bytes(self) -> int:
        """See `Side`."""
        return self.engine.host_memory

    def planned(self, tokens: int) -> Plan:
        """Where a step's bytes go, as `oomb plan` says it."""
        sizes = ModelSizes.of_model(self.model)
        return plan_step(sizes, self._settings.engine_config(), tokens)

    @contextmanager
    def recorded(self) -> Iterator[Recorder]:
        """The engine's events inside go to this recorder."""
        recorder, before = Recorder(), self.engine.config
        self.engine.config = replace(before, recorder=recorder)
        try:
            yield recorder
        finally:
            self.engine.config = before

    def computed(self, tokens: int) -> StepFlops:
        """See `Side`."""
        return chunked(
            self._settings.sizes(),
            tokens,
            chunk=self._settings.chunk,
            policy=self._settings.policy,
            live_chunks=self._settings.live_chunks,
            keep_fill_outputs=self._settings.keep_fill_outputs,
        )


class TheirSide:
    """transformers with layer checkpointing, Liger's kernels and cuDNN attention, on a GPU."""

    def __init__(self, settings: StepSettings) -> None:
        self._settings = settings
        on_gpu = settings.device == "cuda"
        without = _why_no_liger(settings)
        if without is None:
            from liger_kernel.transformers import apply_liger_kernel_to_qwen2

            # It replaces classes of transformers, so it comes before the model.
            apply_liger_kernel_to_qwen2(
                rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=True
            )
        self.model = _model(settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions have a second name
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._kernel = SDPBackend.CUDNN_ATTENTION if on_gpu else None
        self.facts = {
            "attention": "SDPA cuDNN" if on_gpu else "SDPA",
            "checkpointing": "every layer",
            "liger": "rope, rms_norm, swiglu, fused_linear_cross_entropy"
            if without is None
            else f"not used: {without}",
        }

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Side`."""
        with self._attention():
            loss = self.model(input_ids=ids, labels=ids, use_cache=False, return_dict=True).loss
            loss.backward()
        return loss.detach()

    def reserve(self, tokens: int) -> None:
        """See `Side`."""

    def host_bytes(self) -> int:
        """See `Side`."""
        return 0

    def computed(self, tokens: int) -> StepFlops:
        """See `Side`."""
        return checkpointed(self._settings.sizes(), tokens)

    def _attention(self) -> AbstractContextManager[None]:
        return nullcontext() if self._kernel is None else sdpa_kernel(self._kernel)


SIDES: dict[str, type[Side]] = {OURS: OurSide, THEIRS: TheirSide}


def _model(settings: StepSettings) -> PreTrainedModel:
    return make_model(
        SHAPES[settings.shape],
        settings.layers,
        device=torch.device(settings.device),
        dtype=DTYPES[settings.dtype],
    )


def _why_no_liger(settings: StepSettings) -> str | None:
    if not settings.liger:
        return "--no-liger"
    if settings.device != "cuda":
        return "it needs a GPU"
    if importlib.util.find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed"
    return None
