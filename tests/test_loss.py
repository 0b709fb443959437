"""The head and loss in blocks, and the router's balance in chunks, against the whole at once."""

import pytest
import torch
from torch.nn import functional
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from oomb.batch import IGNORED
from oomb.loss.blocks import block_size, chunk_loss, chunk_loss_and_gradient
from oomb.moe import RouterBalance, RouterSettings
from oomb.profiling import LiveBytes

CPU = torch.device("cpu")
VOCAB, HIDDEN = 31, 8


def inputs(rows=2, tokens=13, ignored=0.3, dtype=torch.float64):
    hidden = torch.randn(rows, tokens, HIDDEN, dtype=dtype)
    targets = torch.randint(0, VOCAB, (rows, tokens))
    return hidden, targets.masked_fill(torch.rand(rows, tokens) < ignored, IGNORED)


def linear(dtype=torch.float64, vocab=VOCAB):
    return torch.nn.Linear(HIDDEN, vocab, dtype=dtype)


def whole(layer, hidden, targets, scale, squash=lambda x: x):
    """Loss sum, and gradients of hidden and of the head, from full logits at once."""
    leaf = hidden.detach().requires_grad_()
    logits = squash(layer(leaf))
    loss = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    grads = torch.autograd.grad(loss * scale, [leaf, *layer.parameters()])
    return loss.detach(), *grads


IGNORING = {"none ignored": 0.0, "some ignored": 0.4, "all ignored": 1.1}


@pytest.mark.parametrize("block", [1, 3, 4, 13, 50])
@pytest.mark.parametrize("ignored", IGNORING)
@pytest.mark.parametrize("softcap", [False, True], ids=["plain", "softcap"])
def test_blocks_equal_the_whole(block, ignored, softcap):
    """Whatever a family does to its logits is done, since the head is only called."""
    layer, (hidden, targets) = linear(), inputs(ignored=IGNORING[ignored])
    squash = (lambda x: 5.0 * torch.tanh(x / 5.0)) if softcap else (lambda x: x)

    def head(h, ids):
        return squash(layer(h))

    expected = whole(layer, hidden, targets, 0.25, squash)
    loss, gradient = chunk_loss_and_gradient(head, hidden, targets, targets, block, 0.25)
    results = (loss, gradient, layer.weight.grad, layer.bias.grad)
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    if ignored == "all ignored":
        assert loss == 0
        assert not gradient.any()
        assert not layer.weight.grad.any()
    with torch.no_grad():
        alone = chunk_loss(head, hidden, targets, targets, block)
    torch.testing.assert_close(alone, loss, rtol=1e-14, atol=0.0)


def test_an_empty_row_among_others_adds_nothing():
    """0/0 hides where a block's labels are all ignored; the sum has no denominator to be 0."""
    layer, (hidden, targets) = linear(), inputs(rows=3, ignored=0.0)
    targets[1] = IGNORED
    targets[:, 4:8] = IGNORED  # a whole block
    loss, gradient = chunk_loss_and_gradient(
        lambda h, ids: layer(h), hidden, targets, targets, 4, 1.0
    )
    torch.testing.assert_close(loss, whole(layer, hidden, targets, 1.0)[0], rtol=1e-12, atol=0.0)
    assert not gradient[1].any()
    assert not gradient[:, 4:8].any()
    assert (gradient[0, :4].abs().sum(-1) > 0).all()


def test_gradients_of_the_head_add_to_those_there():
    layer, (hidden, targets) = linear(), inputs()
    before = torch.randn_like(layer.weight)
    layer.weight.grad = before.clone()
    expected = whole(layer, hidden, targets, 0.5)
    chunk_loss_and_gradient(lambda h, ids: layer(h), hidden, targets, targets, 4, 0.5)
    torch.testing.assert_close(layer.weight.grad, before + expected[2], rtol=1e-12, atol=1e-13)


def test_the_graph_behind_hidden_is_not_entered():
    """The chunk's backward is one call, later: nothing below the head may run or be freed here."""
    layer, (content, targets) = linear(), inputs()
    below = content.requires_grad_()
    hidden = below * 1.0
    _, gradient = chunk_loss_and_gradient(lambda h, ids: layer(h), hidden, targets, targets, 4, 1.0)
    assert below.grad is None
    assert not gradient.requires_grad
    hidden.backward(gradient)
    assert torch.equal(below.grad, gradient)


def test_a_frozen_head_still_gives_the_gradient_of_hidden():
    layer, (hidden, targets) = linear().requires_grad_(False), inputs()
    loss, gradient = chunk_loss_and_gradient(
        lambda h, ids: layer(h), hidden, targets, targets, 4, 1.0
    )
    expected = whole(layer.requires_grad_(), hidden, targets, 1.0)
    torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=0.0)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-12, atol=1e-13)
    assert layer.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_logits_are_summed_in_fp32(dtype):
    """As transformers does: cross entropy of logits cast to fp32. The head is the identity."""
    hidden = (4 * torch.randn(2, 40, VOCAB)).to(dtype)
    targets = inputs(tokens=40)[1]
    leaf = hidden.float().requires_grad_()
    expected = functional.cross_entropy(
        leaf.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    expected.backward()
    loss, gradient = chunk_loss_and_gradient(lambda h, ids: h, hidden, targets, targets, 8, 1.0)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected.detach().double(), rtol=1e-6, atol=0.0)
    assert torch.equal(gradient, leaf.grad.to(dtype))  # rounded once, at the end


def test_the_head_gets_each_blocks_own_ids():
    ids = torch.arange(26).view(2, 13)
    layer, (hidden, targets) = linear(), inputs()
    seen = []

    def head(h, block_ids):
        seen.append(block_ids)
        assert h.shape[:2] == block_ids.shape
        return layer(h)

    chunk_loss_and_gradient(head, hidden, ids, targets, 4, 1.0)
    assert [x.shape[1] for x in seen] == [4, 4, 4, 1]
    assert torch.equal(torch.cat(seen, 1), ids)


@pytest.mark.parametrize(
    ("chunk", "block"), [(1, 1), (3, 1), (8, 2), (100, 25), (4096, 1024), (65536, 1024)]
)
def test_a_block_is_a_quarter_of_a_chunk_and_never_large(chunk, block):
    assert block_size(chunk) == block


@pytest.mark.parametrize("gradients", [False, True], ids=["loss alone", "with gradient"])
def test_live_bytes_follow_the_block_and_not_the_chunk(gradients):
    """A few blocks of logits are alive at once (logits, probabilities, gradient), never more."""
    vocab, block = 4001, 16
    layer = linear(torch.float32, vocab).requires_grad_(gradients)
    block_bytes = block * vocab * 4
    peaks = []
    for tokens in (2 * block, 8 * block, 32 * block):
        hidden, targets = inputs(1, tokens, dtype=torch.float32)
        layer.zero_grad()
        with LiveBytes() as live, torch.set_grad_enabled(gradients):
            run = chunk_loss_and_gradient if gradients else chunk_loss
            scale = (1.0,) if gradients else ()
            result = run(lambda h, ids: layer(h), hidden, targets, targets, block, *scale)
        kept = (1 + gradients) * hidden.nbytes + (2 * layer.weight.nbytes if gradients else 0)
        peaks.append(live.peak - kept)
        assert live.peak > 2 * block_bytes  # it does see the logits
        del result
    assert max(peaks) < 4 * block_bytes
    assert max(peaks) - min(peaks) < 0.1 * block_bytes


# -- router ---------------------------------------------------------------------------------------

EXPERTS, TOP_K, LAYERS, ROWS, TOKENS = 5, 2, 3, 2, 17


def router_logits(dtype=torch.float64):
    return [
        torch.randn(ROWS, TOKENS, EXPERTS, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(LAYERS)
    ]


def balance_in_chunks(logits, mask, size, coefficient=0.1, top_k=TOP_K):
    """The loss, with graph, as fill and sweep compute it."""
    balance = RouterBalance(RouterSettings(EXPERTS, top_k, coefficient), CPU)
    starts = range(0, TOKENS, size)

    def chunk(start):
        at = slice(start, start + size)
        real = None if mask is None else mask[:, at].bool()
        return tuple(layer[:, at].flatten(0, 1) for layer in logits), real

    for start in starts:
        balance.count(*chunk(start))
    return sum(balance.loss(balance.mass(*chunk(start))) for start in reversed(starts))


MASKS = {
    "no mask": None,
    "nothing masked": torch.ones(ROWS, TOKENS, dtype=torch.int64),
    "padding": (torch.arange(TOKENS) < torch.tensor([[TOKENS], [5]])).long(),
    "a row of padding": (torch.arange(TOKENS) < torch.tensor([[TOKENS], [0]])).long(),
}


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
@pytest.mark.parametrize("size", [1, 4, TOKENS])
@pytest.mark.parametrize("masked", MASKS)
def test_router_balance_in_chunks_equals_transformers(masked, size, top_k):
    """Counts are exact in fp32; their shares round once, so that is the limit."""
    logits, mask = router_logits(), MASKS[masked]
    gathered = tuple(layer.flatten(0, 1) for layer in logits)
    expected = 0.1 * load_balancing_loss_func(gathered, EXPERTS, top_k, mask)
    expected_grads = torch.autograd.grad(expected, logits)
    loss = balance_in_chunks(logits, mask, size, top_k=top_k)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0, check_dtype=False)
    for a, b in zip(torch.autograd.grad(loss, logits), expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-9)
        if mask is not None:
            assert not a[mask == 0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_router_balance_in_low_precision_loses_nothing_by_adding_up(dtype):
    """Softmax and top-k are in the model's dtype, as in transformers; the sums are in fp32."""
    logits = router_logits(dtype)
    gathered = torch.cat([layer.detach().flatten(0, 1) for layer in logits])
    probabilities = gathered.softmax(-1)
    chosen = functional.one_hot(probabilities.topk(TOP_K, dim=-1).indices, EXPERTS)
    share = chosen.double().mean(0)
    exact = 0.1 * EXPERTS * (share * probabilities.double().mean(0)).sum()
    theirs = 0.1 * load_balancing_loss_func((gathered,), EXPERTS, TOP_K)
    loss = balance_in_chunks(logits, None, 4).detach().double()
    torch.testing.assert_close(loss, exact, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(theirs.double(), exact, rtol=torch.finfo(dtype).eps, atol=0.0)


def test_counts_of_all_chunks_are_needed_before_any_loss():
    """The mean of chunks' own losses is another number, as the mean of means is."""
    logits = router_logits()
    expected = balance_in_chunks(logits, None, TOKENS)
    alone = [
        0.1
        * load_balancing_loss_func(
            tuple(layer[:, at : at + 4].flatten(0, 1) for layer in logits), EXPERTS, TOP_K
        )
        for at in range(0, 16, 4)
    ]
    assert abs(sum(alone) / len(alone) - expected) > 1e-3 * expected
    torch.testing.assert_close(balance_in_chunks(logits, None, 4), expected)


def test_choices_are_counted_past_what_fp32_can_count_to():
    """2^24 + 1 is no fp32 number: 18 layers of a million tokens, all of them on one expert."""
    tokens, layers = 1 << 20, 18
    logits = torch.tensor([[1.0, 0.0]]).expand(tokens, 2)
    balance = RouterBalance(RouterSettings(num_experts=2, top_k=1, coefficient=1.0), CPU)
    balance.count((logits,) * layers, None)
    mean = logits[0].double().softmax(-1)
    loss = balance.loss((mean * tokens * layers).float())
    torch.testing.assert_close(loss.double(), 2 * mean[0], rtol=1e-6, atol=0.0)
