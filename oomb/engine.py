"""The engine: what a person calls to train a model by chunk recurrence."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from oomb.attention import Backend, choose_backend
from oomb.batch import Batch, check_batch
from oomb.chunking import ChunkPlan, plan_chunks
from oomb.config import EngineConfig
from oomb.fused import Replacement, find_replacements, liger_functions
from oomb.gradients import GradientLedger, give_back_grad_dtype
from oomb.hf import unwrap
from oomb.installed import InstalledModel
from oomb.loss import can_run
from oomb.offload import OffloadStore, reserve_for_step
from oomb.passes import LayerAttention, Passes
from oomb.planner import Card, ModelSizes, page_budget, refuse_what_cannot_fit
from oomb.probes import (
    compare_with_whole_run,
    find_linear_head,
    probe_model,
    refuse_other_channels,
)
from oomb.profiling.live_bytes import category
from oomb.profiling.optimizer import OptimizerStages
from oomb.randomness import RandomState
from oomb.results import ChunkState, StepResult
from oomb.stopwatch import Stopwatch

PROBE_PAGE = 8
"""Tokens per page when attaching, where tiny chunks are compared with the whole run."""

# Models with a step under way, whichever engine runs it.
_AT_WORK: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class Engine:
    """Trains a transformers causal language model by chunk recurrence, with exact gradients.

    The model is changed only while a chunk is computed; between steps, and between the chunks of
    `iter_step`, it behaves as if there were no engine.

    Args:
        model: a transformers causal language model (or PEFT's wrapper of one) on one device.
        config: settings; see `EngineConfig`.

    Raises:
        TypeError: the model is no transformers model.
        ValueError: the model has a feature that chunk recurrence here does not compute exactly, or
            the chosen attention backend cannot run it; the message names it.
    """

    def __init__(self, model: Any, config: EngineConfig | None = None) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise TypeError(f"config must be an oomb.EngineConfig, got {type(config).__name__}")
        self.config = config or EngineConfig()
        self._trained = model
        self._model, self._facts = probe_model(unwrap(model))
        self._installed = InstalledModel(
            self._model,
            self._facts,
            self.config.activation_policy,
            self._fused_parts(),
            self._fused_head(),
        )
        self._signature = _signature(self._model.whole)
        self._refuse_nothing_to_choose()
        self._backend = self._choose_backend()
        self._closed = False
        self._steps = 0
        self._watched = OptimizerStages()
        offload = self.config.offload
        self._store = OffloadStore(offload, self._model.device) if offload is not None else None
        self._generators: weakref.WeakSet[Generator] = weakref.WeakSet()
        refuse_other_channels(self._model, self._facts)
        compare_with_whole_run(self._model, self._facts, self._run_probe)

    def __repr__(self) -> str:
        return (
            f"Engine({type(self._model.whole).__name__} on {self._model.device}, "
            f"attention_backend='{self.attention_backend}', {self.config})"
        )

    @property
    def attention_backend(self) -> str:
        """Name of the attention backend at work; tells what `auto` chose."""
        return self._backend.name

    @property
    def fused_kernels(self) -> tuple[str, ...]:
        """Names of the fused kernels at work; those that could not be used are in the log."""
        names = [part.name for part in self._installed.replacements]
        names += ["cross_entropy"] if self._installed.linear_head is not None else []
        return tuple(dict.fromkeys(names))

    @property
    def host_memory(self) -> int:
        """Bytes of host memory held for pages; they are kept from step to step."""
        return self._store.nbytes if self._store is not None else 0

    def reserve(self, tokens: int, rows: int = 1) -> int:
        """Take the host memory that steps of this size need now, rather than in the first of them.

        Registering it with CUDA takes about half a second per GiB. Only offloading needs any.

        Args:
            tokens: of each row.
            rows: of the batch.

        Returns:
            Bytes of host memory held.

        Raises:
            ValueError: it is more than `host_budget`, or than the host has to spare.
            MemoryError: the host does not give it.
            RuntimeError: the engine is closed, or a step is under way.
        """
        batch, plan, _ = self._prepare(torch.zeros(rows, tokens, dtype=torch.int64), *[None] * 5)
        if self._store is None:
            return 0
        rows = len(batch.lengths)
        layers = self._facts.layers
        reserve_for_step(layers, self._store, self.config, plan, rows=rows, gradients=True)
        return self._store.nbytes

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Show each `optimizer.step()` as a stage of the engine's step before it.

        Args:
            optimizer: that of the model's parameters.

        Raises:
            TypeError: it is no torch optimizer.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; pass "
                "the one whose step() is called"
            )
        self._watched.watch(optimizer)

    def close(self) -> None:
        """Give the model back as it was. Gradients stay the user's. Closing twice is allowed.

        A parameter that holds a gradient at this time keeps `grad_dtype` at its gradient's dtype.

        Raises:
            RuntimeError: an `iter_step` is under way; close or finish its generator first.
        """
        self._refuse_if_busy()
        if not self._closed:
            for parameter in self._trained.parameters():
                give_back_grad_dtype(parameter)
            if self._store is not None:
                self._store.close()
            self._watched.close()
            self._closed = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: Any) -> None:
        for steps in list(self._generators):  # one that is under way is abandoned: undone
            steps.close()
        self.close()

    def step(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_items_in_batch: float | torch.Tensor | None = None,
    ) -> StepResult:
        """Forward and backward over a whole batch; gradients are added to `.grad`.

        Equals `model(input_ids, labels=L, ...).loss.backward()`, where L is `labels`, or
        `input_ids` with padding set to -100, and the first token of each document set to -100.

        Args:
            input_ids: int [B, N], on the CPU or the model's device.
            labels: int [B, N], not shifted, -100 ignored.
            attention_mask: [B, N], 1 on tokens, 0 on padding to their right.
            position_ids: int [B, N] or [1, N]; without document_ids a jump other than +1 starts a
                new document. Positions beyond those a model was trained on are not refused.
            document_ids: int [B, N]; no document sees another. Positions restart in each, unless
                position_ids says otherwise.
            num_items_in_batch: divide the summed loss by this instead of by the counted labels.

        Returns:
            `.loss` (0-d, NaN where no label counts, as in transformers), `.num_label_tokens`,
            `.peak_memory` (bytes on a GPU, None on a CPU) and `.timings` (seconds).

        Raises:
            TypeError: an argument or an existing gradient has the wrong type or dtype.
            ValueError: an argument has a wrong shape, device or value.
            RuntimeError: the engine is closed or busy, gradients of an abandoned step were not
                zeroed, or `check_replay` found a difference.
        """
        steps = self.iter_step(
            input_ids, labels, attention_mask, position_ids, document_ids, num_items_in_batch
        )
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    def iter_step(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_items_in_batch: float | torch.Tensor | None = None,
    ) -> Generator[ChunkState, None, StepResult]:
        """`step`, halting after each chunk of fill and sweep; the generator returns the StepResult.

        The arguments and errors are those of `step`; they are checked before this returns.
        Closing the generator early, or an exception, leaves no page, hook or random state behind:
        gradients that were None are None again, others are marked incomplete.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "a step needs gradients, but torch.inference_mode is on; leave its block, or use "
                "engine.evaluate"
            )
        batch, plan, attention = self._prepare(
            input_ids, labels, attention_mask, position_ids, document_ids, num_items_in_batch
        )
        ledger = GradientLedger(
            self._trained, self.config.grad_dtype, restore=self.config.restore_grads
        )
        ledger.check()
        steps = self._step(batch, plan, attention, ledger)
        self._generators.add(steps)
        return steps

    def evaluate(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_items_in_batch: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss that `step` would give, without gradients: 0-d tensor on the model's device.

        Arguments and errors are those of `step`.
        """
        batch, plan, attention = self._prepare(
            input_ids, labels, attention_mask, position_ids, document_ids, num_items_in_batch
        )
        with self._work(None), self._passes(batch, plan, attention) as passes:
            for chunk in plan.chunks:
                passes.evaluate(chunk)
            return passes.loss()

    def _step(
        self,
        batch: Batch,
        plan: ChunkPlan,
        attention: list[LayerAttention],
        ledger: GradientLedger,
    ) -> Generator[ChunkState, None, StepResult]:
        with self._work(ledger):
            watch = Stopwatch(self._model.device)
            number, self._steps = self._steps, self._steps + 1
            with self._passes(batch, plan, attention, number) as passes:
                self._watched.timeline = passes.timeline
                watch.mark("fill")
                with passes.phase("fill"):
                    for chunk in plan.chunks[:-1]:
                        passes.fill(chunk)
                        yield passes.state("fill", chunk)
                passes.turn()
                watch.mark("sweep")
                with passes.phase("sweep"):
                    for chunk in reversed(plan.chunks):
                        with ledger.hooks_held_back():
                            passes.sweep(chunk)
                        yield passes.state("sweep", chunk)
                passes.finish()
                watch.mark("end")
        return StepResult(passes.loss(), batch.num_label_tokens, watch.peak_memory(), watch.timings)

    def _passes(
        self,
        batch: Batch,
        plan: ChunkPlan,
        attention: list[LayerAttention],
        step: int | None = None,
    ) -> Passes:
        return Passes(self._installed, self.config, batch, plan, attention, step, self._store)

    @contextmanager
    def _work(self, ledger: GradientLedger | None) -> Iterator[None]:
        """A step from begin to end: settled if it ends, undone if it is abandoned or raises."""
        self._refuse_unless_ready()  # things may have changed since the arguments were checked
        before = RandomState.capture(self._model.device)
        _AT_WORK.add(self._model.whole)
        try:
            if ledger is not None:
                ledger.open()
            yield
        except BaseException:
            before.restore()
            if ledger is not None:
                ledger.roll_back()
            raise
        finally:
            _AT_WORK.discard(self._model.whole)
        if ledger is not None:
            ledger.commit()

    def _prepare(self, *arguments: Any) -> tuple[Batch, ChunkPlan, list[LayerAttention]]:
        """Check the engine's state and a step's arguments; plan its chunks and attention."""
        self._refuse_unless_ready()
        for layer in self._facts.layers:
            if layer.module.training and layer.dropout > 0:
                raise ValueError(
                    f"attention dropout must be 0 in training, got {layer.dropout} in "
                    f"{layer.name}; set config.attention_dropout=0 when loading the model, or "
                    "call model.eval()"
                )
        with category("inputs"):
            batch = check_batch(
                *arguments,
                vocab_size=self._model.vocab_size,
                device=self._model.device,
                max_positions=self._facts.max_positions,
            )
        plan = self._plan(self.config, batch)
        if self._model.device.type == "cuda":
            self._fit_to_card(max(batch.lengths), plan.pages_per_row)
        return batch, plan, self._attention(batch)

    def _fit_to_card(self, context: int, pages: list[int]) -> None:
        """Give pages what the GPU has left, or refuse a step that cannot fit."""
        sizes = ModelSizes.of_model(self._model.whole)
        card, config = Card.of(self._model.whole, self._model.device), self.config
        if self._store is not None and config.offload is not None:
            if config.offload.gpu_budget == "auto":
                self._store.gpu_budget = page_budget(sizes, config, context, pages, card)
            budget = replace(config.offload, gpu_budget=self._store.gpu_budget)
            config = replace(config, offload=budget)
        refuse_what_cannot_fit(sizes, config, context, pages, card)

    def _refuse_unless_ready(self) -> None:
        """Refuse to work when closed, when a step is under way, or on a model that has changed."""
        if self._closed:
            raise RuntimeError("this engine is closed; make a new oomb.Engine(model, ...)")
        self._refuse_if_busy()
        if _signature(self._model.whole) != self._signature:
            raise RuntimeError(
                "the model's modules, or its parameters' dtype or device, changed after the engine "
                "was attached; close it and make a new oomb.Engine(model, ...)"
            )
        if torch.is_autocast_enabled(self._model.device.type):
            raise RuntimeError(
                "the engine computes in the model's own dtype, but autocast is on; leave the "
                "autocast block, and load the model in the dtype you want"
            )

    def _refuse_if_busy(self) -> None:
        if self._model.whole in _AT_WORK:
            raise RuntimeError(
                "an iter_step on this model is under way; finish or close its generator first"
            )

    @staticmethod
    def _plan(config: EngineConfig, batch: Batch) -> ChunkPlan:
        return plan_chunks(
            batch.lengths,
            batch.documents,
            chunk_size=config.chunk_size,
            page_size=config.page_size,
        )

    def _attention(self, batch: Batch) -> list[LayerAttention]:
        """How each layer attends to a batch; a window longer than every row is none."""
        longest = max(batch.lengths)
        windows = [
            layer.window if layer.window is not None and layer.window < longest else None
            for layer in self._facts.layers
        ]
        documents = len(set(batch.lengths)) > 1 or any(len(each) > 1 for each in batch.documents)
        dense = self._choose_backend(documents=True) if documents else self._backend
        windowed = self._choose_backend(windows=True) if any(windows) else dense
        sparse = self.config.sparse is not None
        return [
            LayerAttention(w, windowed if w else dense, sparse and layer.window is None)
            for w, layer in zip(windows, self._facts.layers, strict=True)
        ]

    def _refuse_nothing_to_choose(self) -> None:
        if self.config.sparse is not None and all(each.window for each in self._facts.layers):
            raise ValueError(
                f"sparse must be None for {type(self._model.whole).__name__}, whose layers are all "
                "local by design: they read a sliding window, and choose no pages"
            )

    def _choose_backend(self, *, windows: bool = False, documents: bool = False) -> Backend:
        shapes = [layer.shape for layer in self._facts.layers]
        return choose_backend(
            self.config.attention_backend,
            device=self._model.device,
            dtype=shapes[0].dtype,
            head_dims={shape.dim for shape in shapes},
            deterministic=self.config.deterministic,
            windows=windows,
            documents=documents,
            sparse=self.config.sparse is not None and not windows,
            accumulate=self.config.accumulate,
        )

    def _fused_parts(self) -> list[Replacement]:
        dtype = self._facts.layers[0].shape.dtype
        functions = liger_functions(self._model.device, dtype)
        if self.config.fused_kernels == "off" or functions is None:
            return []
        return find_replacements(self._model, self._facts, functions)

    def _fused_head(self) -> torch.nn.Linear | None:
        """The head whose loss the cross-entropy kernel computes, or None: see `oomb.loss`."""
        dtype = self._facts.layers[0].shape.dtype
        if self.config.fused_kernels == "off" or not can_run(self._model.device, dtype):
            return None
        return find_linear_head(self._model, self._facts)

    def _run_probe(
        self, ids: torch.Tensor, *, in_chunks: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and loss of ids [1, n], in tiny chunks or in a single one."""
        pages = 3 if in_chunks else -(-ids.shape[1] // PROBE_PAGE)
        config = replace(
            self.config,
            chunk_size=pages * PROBE_PAGE,
            page_size=PROBE_PAGE,
            segment_pages=2,
            page_dtype=None,  # rounding depends on where pages are cut
            offload=None,
            sparse=None,  # the whole run reads all
            recorder=None,
        )
        batch = check_batch(
            ids, vocab_size=self._model.vocab_size, device=ids.device, max_positions=None
        )
        plan = self._plan(config, batch)
        passes = Passes(self._installed, config, batch, plan, self._attention(batch))
        hidden = [passes.evaluate(chunk) for chunk in plan.chunks]
        return torch.cat(hidden, dim=1), passes.loss()


def _signature(model: torch.nn.Module) -> tuple:
    """What must not change under an engine: modules, and parameters' place and dtype."""
    modules = tuple(id(module) for module in model.modules())
    return modules, frozenset((p.device, p.dtype) for p in model.parameters())
