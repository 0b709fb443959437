"""Fill and sweep: the two passes of one step over a batch.

Chunk i computes its outputs and its K_i, V_i from its tokens and the K, V of the chunks before it.
The *fill* runs the chunks in order without gradients and leaves their K/V in pages. The *sweep*
runs them in reverse with gradients: forward again, loss, backward. A chunk's backward adds its term
to the page gradients of every earlier chunk; when the sweep reaches chunk j, the terms of all later
chunks are there already, so its own backward starts from them and is complete. The activations of
one chunk (or of `live_chunks`) are alive at any time, and nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from oomb.attention import Backend, ChunkAttention, LayerCall, attend
from oomb.batch import Batch
from oomb.cache import Visit
from oomb.chunking import Chunk, ChunkPlan
from oomb.columns import Columns
from oomb.config import EngineConfig
from oomb.fill_ending import FillEnding
from oomb.fill_outputs import FillOutputs
from oomb.hf import SINK
from oomb.installed import InstalledModel
from oomb.loss import (
    block_size,
    chunk_loss,
    chunk_loss_and_gradient,
    linear_loss,
    linear_loss_and_gradient,
)
from oomb.moe import RouterBalance
from oomb.offload import HostOutputs, OffloadStore, make_history
from oomb.probes import is_watched, router_settings
from oomb.profiling.clock import clock_of
from oomb.profiling.place import Place, at_place
from oomb.profiling.stage import halting_stage, stage
from oomb.profiling.timeline import Timeline
from oomb.randomness import RandomState
from oomb.results import ChunkState, Phase
from oomb.sparse import Selector


@dataclass(frozen=True)
class LayerAttention:
    """How a layer attends to a batch.

    Attributes:
        window: its sliding window in tokens, None where no row is longer.
        backend: what computes it.
        sparse: whether its queries choose the pages of history that they read.
    """

    window: int | None
    backend: Backend
    sparse: bool = False


class Passes:
    """One batch on its way through the model.

    Args:
        installed: the model.
        config: the engine's settings.
        batch: checked arguments.
        plan: its chunks.
        attention: how each layer attends to this batch.
        step: number of the step, for events; None outside of one.
        store: host memory for pages, or None.

    Attributes:
        timeline: takes the step's stages; None where there is no recorder.
    """

    def __init__(
        self,
        installed: InstalledModel,
        config: EngineConfig,
        batch: Batch,
        plan: ChunkPlan,
        attention: list[LayerAttention],
        step: int | None = None,
        store: OffloadStore | None = None,
    ) -> None:
        self._training, self._store = step is not None, store
        self._installed = installed
        self._model, self._facts = installed.model, installed.facts
        self._config, self._batch, self._plan = config, batch, plan
        self._attention = attention
        self._device = installed.model.device
        self._columns = Columns(batch, self._device)
        self.timeline: Timeline | None = None
        if config.recorder is not None:
            clock = clock_of(self._device)
            self.timeline = Timeline(config.recorder.on_event, clock, step)
        self._history = make_history(
            self._facts.layers,
            store,
            config,
            plan,
            rows=len(batch.lengths),
            gradients=self._training,
            device=self._device,
            step=step,
        )
        chosen = {n: self._facts.layers[n].shape for n, each in enumerate(attention) if each.sparse}
        self._selector = Selector(config.sparse, chosen, plan, self._history, self._device)
        router = router_settings(self._model)  # now, since they may change between steps
        self._balance = RouterBalance(router, self._device) if router else None
        head = installed.linear_head
        self._linear_head = None if head is None or is_watched(head) else head
        self._fill_outputs = self._make_fill_outputs()
        self._ending = FillEnding(wanted=router is None)  # experts are counted in every layer
        self._live: dict[int, tuple[Any, torch.Tensor]] = {}  # by chunk: output with its graph, ids
        self._random: list[RandomState] = []
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._mass = torch.zeros_like(self._loss_sum)  # of routing; [experts] once chunks come
        self._phase: Phase | None = None
        self._chunk: Chunk | None = None

    def _make_fill_outputs(self) -> FillOutputs:
        filled = self._plan.chunks[: -self._config.live_chunks]
        if not (self._config.keep_fill_outputs and self._training and filled):
            return FillOutputs(keep=False)
        if not self._outputs_on_host:
            return FillOutputs(keep=True)
        rows = len(self._batch.lengths)
        return HostOutputs(self._store, self._facts.layers, filled, rows, self._device)

    @property
    def _outputs_on_host(self) -> bool:
        return self._store is not None and self._store.config.fill_outputs

    # -- fill -------------------------------------------------------------------------------------

    def fill(self, chunk: Chunk) -> None:
        """Run a chunk and leave its K and V in pages; without gradients unless it stays alive."""
        before = RandomState.capture(self._device)
        self._random.append(before)
        alive = self._stays_alive(chunk)
        ending = None if alive else self._ending
        with self._at("fill", chunk, ending=ending), torch.set_grad_enabled(alive):
            self._expect(chunk, forward=True)
            self._hold_pages(chunk)
            output, ids = self._forward(chunk)
            self._count_experts(chunk, output)
        if alive:
            self._live[chunk.index] = output, ids
        else:
            self._ending.chunk_done(before, RandomState.capture(self._device))

    def _ends_early(self, chunk: Chunk) -> bool:
        return self._ending.comes and not self._stays_alive(chunk)

    def _stays_alive(self, chunk: Chunk) -> bool:
        return chunk.index >= len(self._plan.chunks) - self._config.live_chunks

    def evaluate(self, chunk: Chunk) -> torch.Tensor:
        """Run a chunk without gradients, its loss included; returns its hidden states."""
        with self._at("fill", chunk, name="evaluate"), torch.no_grad():
            self._expect(chunk, forward=True)
            self._hold_pages(chunk)
            output, ids = self._forward(chunk)
            if self._balance is not None:
                self._count_experts(chunk, output)
                self._mass = self._mass + self._balance.mass(
                    output.router_logits, self._real(chunk)
                )
            targets = self._columns.targets(chunk.start, chunk.stop)
            with stage("loss"):
                self._loss_sum += self._loss_alone(output.last_hidden_state, ids, targets)
            self._selector.drop(chunk)
            return output.last_hidden_state

    # -- sweep ------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Between the passes: every page is written and no gradient exists yet."""
        self._random.append(RandomState.capture(self._device))
        self._history.open_gradients()

    def sweep(self, chunk: Chunk) -> None:
        """Run a chunk's backward, after its forward unless that is alive; then free its pages."""
        self._random[chunk.index].restore()
        with self._at("sweep", chunk), torch.enable_grad():
            self._expect(chunk, forward=chunk.index not in self._live, backward=True)
            output, ids = self._live.pop(chunk.index, None) or self._forward(chunk)
            if chunk is self._plan.chunks[-1]:  # it had no fill, and one ordinary forward ends here
                self._count_experts(chunk, output)
                self._after_forward = RandomState.capture(self._device)
                self._selector.all_chosen()
            self._backward(chunk, output, ids)
        for read in chunk.reads:
            self._history.table.add_term(read.row, read.first, read.last)
        for write in chunk.writes:
            self._history.table.release(write.row, write.first)
        self._fill_outputs.drop(chunk)
        self._selector.drop(chunk)
        self._random.pop()

    def _backward(self, chunk: Chunk, output: Any, ids: torch.Tensor) -> None:
        hidden = output.last_hidden_state
        targets = self._columns.targets(chunk.start, chunk.stop)
        with stage("loss"):
            loss, gradient = self._loss_and_gradient(hidden, ids, targets)
        self._loss_sum += loss
        roots, gradients = [hidden], [gradient]
        if self._balance is not None:
            mass = self._balance.mass(output.router_logits, self._real(chunk))
            self._mass = self._mass + mass.detach()
            roots.append(self._balance.loss(mass))
            gradients.append(None)
        trained = [(r, g) for r, g in zip(roots, gradients, strict=True) if r.requires_grad]
        if trained:  # not so where only the head is trained
            torch.autograd.backward(*zip(*trained, strict=True))

    def _loss_alone(
        self, hidden: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        if self._linear_head is not None:
            return linear_loss(self._linear_head, hidden, targets)
        with self._model.head(self._facts.output_class) as head:
            return chunk_loss(head, hidden, ids, targets, self._block)

    def _loss_and_gradient(
        self, hidden: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self._scale
        if self._linear_head is not None:
            return linear_loss_and_gradient(self._linear_head, hidden, targets, scale)
        with self._model.head(self._facts.output_class) as head:
            return chunk_loss_and_gradient(head, hidden, ids, targets, self._block, scale)

    def finish(self) -> None:
        """Leave the generators where one ordinary forward pass would."""
        self._after_forward.restore()

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *_: Any) -> None:
        self._live.clear()
        self._fill_outputs.close()
        self._selector.close()
        self._history.close()
        if self.timeline is not None:
            self.timeline.close()

    # -- what both share --------------------------------------------------------------------------

    def loss(self) -> torch.Tensor:
        """Loss over the whole batch, 0-d, in fp32 (fp64 for an fp64 model)."""
        count = self._batch.denominator
        loss = self._loss_sum / count if count else self._loss_sum * float("nan")
        if self._balance is not None:
            loss = loss + self._balance.loss(self._mass)
        return loss.to(torch.promote_types(self._facts.layers[0].shape.dtype, torch.float32))

    def state(self, phase: Phase, chunk: Chunk) -> ChunkState:
        """A picture of the step after a chunk."""
        alive = self._history.bytes_alive() | self._selector.bytes_alive()
        outputs = "host_fill_outputs" if self._outputs_on_host else "fill_outputs"
        alive[outputs] = self._fill_outputs.nbytes
        alive["random_states"] = sum(state.nbytes for state in self._random)
        return ChunkState(
            phase=phase,
            chunk=chunk.index,
            num_chunks=len(self._plan.chunks),
            page_table=self._history.table.view(),
            bytes_alive=MappingProxyType(alive),
        )

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """A whole pass; the caller may halt between its chunks."""
        return halting_stage("phase", Place(name, None, self.timeline))

    @property
    def _scale(self) -> float:
        return 1.0 / self._batch.denominator if self._batch.denominator else 0.0

    @property
    def _block(self) -> int:
        return block_size(self._config.chunk_size)

    @contextmanager
    def _at(
        self,
        phase: Phase,
        chunk: Chunk,
        name: str | None = None,
        ending: FillEnding | None = None,
    ) -> Iterator[None]:
        """The engine is inside the model, at this chunk, until the chunk's backward has ended."""
        self._phase, self._chunk = phase, chunk
        if self.timeline is not None:
            self.timeline.clock.anchor()
        with (
            at_place(Place(name or phase, chunk.index, self.timeline)),
            stage("chunk"),
            self._installed.switched_in(self._attend, ending),
        ):
            yield
        if self.timeline is not None:
            self.timeline.publish()

    def _expect(self, chunk: Chunk, *, forward: bool, backward: bool = False) -> None:
        """Tell the history in which order a chunk's attention will ask for it."""
        layers = range(len(self._attention))
        again = self._config.activation_policy == "layer"
        if backward and self._fill_outputs.has(chunk):
            self._fill_outputs.expect(chunk, [*layers, *(reversed(layers) if again else ())])
            forward = again = False
        visits = [self._visit(layer, "keys") for layer in layers] if forward else []
        if not backward and self._ends_early(chunk) and not self._fill_outputs.wanted:
            visits.pop()
        for layer in reversed(layers) if backward else ():
            visits += [self._visit(layer, "keys")] if again else []
            visits += [self._visit(layer, "own"), self._visit(layer, "gradients")]
        self._history.expect(chunk, visits)

    def _visit(self, layer: int, what: str) -> Visit:
        return Visit(layer, what, self._attention[layer].window)

    def _forward(self, chunk: Chunk) -> tuple[Any, torch.Tensor]:
        """Base model's output and token ids of a chunk."""
        ids, positions = self._columns.inputs(chunk.start, chunk.stop)
        extra = {"output_router_logits": True} if self._balance is not None else {}
        return self._model.hidden_states(ids, positions, **extra), ids

    def _attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        _mask: Any,
        scale: float,
        dropout: float,
        keywords: dict[str, Any],
    ) -> torch.Tensor:
        """The model's attention: q [B, H, n, D], k and v [B, G, n, D] -> [B, n, H, D]."""
        layer = self._installed.numbers[module]
        if dropout:  # switched on after the engine was attached
            raise ValueError(
                f"attention dropout must be 0 in training, got {dropout} in "
                f"{self._facts.layers[layer].name}; set it to 0 or call model.eval()"
            )
        call = LayerCall(
            layer=layer,
            scale=scale,
            window=self._attention[layer].window,
            chunk=self._chunk,
            history=self._history,
            backend=self._attention[layer].backend,
            sink=keywords.get(SINK),
            selections=self._selector.choose(self._chunk, layer, q),
        )
        if self._phase == "fill":
            self._write_pages(call, k, v)
            if not torch.is_grad_enabled():
                return self._attend_in_fill(call, q, k, v)
        elif self._config.check_replay:
            self._compare_with_pages(layer, k, v)
        replay = self._installed.replays[layer]
        call.kept = replay.take() or self._fill_outputs.get(self._chunk, layer)
        out, lse = ChunkAttention.apply(q, k, v, call, call.sink)
        replay.keep(out, lse)
        return out

    def _write_pages(self, call: LayerCall, k: torch.Tensor, v: torch.Tensor) -> None:
        for write in self._chunk.writes:
            own_k, own_v = (x[write.row, :, write.start : write.stop].detach() for x in (k, v))
            self._history.write(call.layer, write.row, write.first, own_k, own_v)
        self._selector.pages_written(self._chunk, call.layer)

    def _attend_in_fill(
        self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        ends = self._ending.comes and call.layer == len(self._facts.layers) - 1
        if ends and not self._fill_outputs.wanted:
            self._ending.end()
        with self._fill_outputs.counted():
            out, lse = attend(call, q, k, v)
        self._fill_outputs.put(self._chunk, call.layer, out, lse)
        if ends:
            self._ending.end()
        return out

    def _compare_with_pages(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for write in self._chunk.writes:
            own_k, own_v = (
                self._history.as_stored(x[write.row, :, write.start : write.stop], write.first)
                for x in (k.detach(), v.detach())
            )
            for at, page in self._history.pieces(layer, write.row, write.first, write.last):
                for name, now, then in (("K", own_k, page.k), ("V", own_v, page.v)):
                    if not torch.equal(now[:, at], then[0]):
                        worst = float((now[:, at] - then[0]).abs().max())
                        raise RuntimeError(
                            f"check_replay: {name} of layer {layer}, chunk {self._chunk.index} "
                            f"differs between fill and sweep by up to {worst:.3g}; the model is "
                            "not repeatable (random numbers or state outside of torch's generators)"
                        )

    def _hold_pages(self, chunk: Chunk) -> None:
        for write in chunk.writes:
            self._history.table.hold(write.row, write.first, write.last)

    def _count_experts(self, chunk: Chunk, output: Any) -> None:
        if self._balance is not None:
            self._balance.count(output.router_logits, self._real(chunk))

    def _real(self, chunk: Chunk) -> torch.Tensor | None:
        return self._columns.real_tokens(chunk.start, chunk.stop)
