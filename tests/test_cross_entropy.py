"""The cross-entropy kernel against PyTorch: on a GPU, or in Triton's interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch
from helpers import gradients, tiny_model, worst_error
from torch.nn import functional

import oomb
from oomb.batch import IGNORED

pytest.importorskip("triton", reason="needs Triton")
cross_entropy = pytest.importorskip("oomb.loss.cross_entropy")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # in Triton's interpreter: see conftest


def row_losses(logits, targets):
    """PyTorch's losses and their gradient in fp32."""
    leaf = logits.float().clone().requires_grad_()
    losses = functional.cross_entropy(leaf, targets, ignore_index=IGNORED, reduction="none")
    losses.sum().backward()
    return losses.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 97, 128, 129, 1000])
@pytest.mark.parametrize("block", [64, 16384])
def test_losses_and_gradients_equal_pytorchs(vocab, dtype, block, monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK", block)
    logits = (4 * torch.randn(6, vocab, device=DEVICE)).to(dtype)
    targets = torch.randint(0, vocab, (6,), device=DEVICE)
    targets[1] = targets[5] = IGNORED
    targets[0] = vocab - 1
    losses, gradient = row_losses(logits, targets)
    before = logits.clone()
    alone = cross_entropy.cross_entropy_(logits, targets, gradient=False)
    assert torch.equal(logits, before)
    found = cross_entropy.cross_entropy_(logits, targets)
    assert torch.equal(found, alone)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(
        logits.float(), gradient, rtol=rounding, atol=max(1e-6, rounding / 8)
    )
    assert not logits[[1, 5]].any()


def test_rows_of_a_wider_tensor_leave_the_rest_alone():
    wide = torch.randn(4, 300, device=DEVICE)
    rest, logits = wide[:, 257:].clone(), wide[:, :257]
    targets = torch.tensor([256, 3, IGNORED, 0], device=DEVICE)
    losses, gradient = row_losses(logits, targets)
    torch.testing.assert_close(cross_entropy.cross_entropy_(logits, targets), losses)
    torch.testing.assert_close(logits, gradient)
    assert torch.equal(wide[:, 257:], rest)


def test_targets_may_have_strides():
    """Those of a chunk's only token are a column of the batch's."""
    logits = torch.randn(4, 50, device=DEVICE)
    column = torch.randint(0, 50, (4, 7), device=DEVICE)[:, 3:4].flatten()
    assert not column.is_contiguous()
    losses, gradient = row_losses(logits, column)
    torch.testing.assert_close(cross_entropy.cross_entropy_(logits, column), losses)
    torch.testing.assert_close(logits, gradient)


def test_extreme_logits(monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK", 64)
    logits = torch.randn(4, 200, device=DEVICE)
    logits[0, :130] = float("-inf")  # whole blocks of it, as where a family hides part of a table
    logits[1] = -3e38
    logits[2, 7] = 3e38
    logits[3] *= 1e4
    targets = torch.tensor([150, 3, 7, 9], device=DEVICE)
    losses, gradient = row_losses(logits, targets)
    torch.testing.assert_close(cross_entropy.cross_entropy_(logits, targets), losses)
    torch.testing.assert_close(logits, gradient)


def test_a_logit_that_is_no_number_shows():
    logits = torch.randn(2, 200, device=DEVICE)
    logits[0, 150] = float("nan")
    losses = cross_entropy.cross_entropy_(logits, torch.tensor([1, 2], device=DEVICE))
    assert losses.isnan().tolist() == [True, False]


def test_a_step_through_the_kernel(monkeypatch):
    ids = torch.randint(0, 97, (2, 29), device=DEVICE)
    model = tiny_model("qwen2", torch.float32).to(DEVICE)

    def step(fused):
        monkeypatch.setattr("oomb.engine.can_run", lambda device, dtype: fused)
        config = oomb.EngineConfig(chunk_size=12, page_size=4, attention_backend="reference")
        model.zero_grad()
        with oomb.Engine(model, config) as engine:
            assert ("cross_entropy" in engine.fused_kernels) == fused
            loss = engine.step(ids).loss
            torch.testing.assert_close(engine.evaluate(ids), loss, rtol=1e-6, atol=0.0)
        return loss, gradients(model)

    (loss, ours), (expected_loss, expected) = step(True), step(False)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0.0)
    error, name = worst_error(ours, expected)
    assert error < 2e-5, name


@pytest.mark.gpu
def test_more_logits_than_int32_can_count():
    rows, vocab = 16500, 131072  # 2^31 + 15 million
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    targets = torch.full((rows,), 5, device="cuda")
    logits[-1, 5] = 20.0
    losses = cross_entropy.cross_entropy_(logits, targets)
    expected = torch.tensor([20.0, *[0.0] * (vocab - 1)], device="cuda").logsumexp(0) - 20.0
    torch.testing.assert_close(losses[-1], expected, rtol=1e-4, atol=1e-5)
    assert logits[-2, 5] == -1.0
