"""Backward of a part, given out and lse over all parts.

Two kernels, each the only writer of what it adds to: `key_grads_kernel` owns a tile of keys and
walks the queries of all heads that share them, `query_grads_kernel` owns a block of queries and
walks the keys. Scores are computed twice for it, which is cheaper than atomics, and every run adds
in the same order. With ATOMIC the second kernel scatters the key gradients as it goes, as the paper
does, and the first is not needed.
"""

import triton
import triton.language as tl

from oomb.attention.impl.triton.primitives import (
    grad_rows,
    key_range,
    load_tile,
    tile_rows,
    visible,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def delta_kernel(
    out_ptr, grad_ptr, delta_ptr,
    stride_ob, stride_on, stride_oh, stride_gb, stride_gn, stride_gh,
    N, H: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """delta [B, H, N] fp32: out . grad_out of each query; out and grad_out [B, N, H, DIM]."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    dims = tl.arange(0, D)
    inside = (i < N)[:, None] & (dims < DIM)[None, :]
    tokens = i.to(tl.int64)[:, None]
    out = tl.load(
        out_ptr + b * stride_ob + h * stride_oh + tokens * stride_on + dims[None, :],
        mask=inside, other=0.0,
    )  # fmt: skip
    grad = tl.load(
        grad_ptr + b * stride_gb + h * stride_gh + tokens * stride_gn + dims[None, :],
        mask=inside, other=0.0,
    )  # fmt: skip
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + (b * H + h) * N + i, delta, mask=i < N)


@triton.jit
def key_grads_kernel(
    q_desc, grad_desc, q_ptr, grad_ptr, k_desc, v_desc, k_ptr, v_ptr,
    page_rows, lowest_ptr, beyond_ptr, lse_ptr, delta_ptr, grad_k_ptr, grad_v_ptr,
    stride_qb, stride_qh, stride_qn, stride_ob, stride_oh, stride_on,
    stride_kb, stride_head, stride_row, stride_gb, stride_ghead, stride_grow, stride_lb, stride_lh,
    N, S, scale, offset, window,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, GATHER: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, COPIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of a tile of keys, in their own dtype.

    q and grad_out [B, H, N, DIM]; lse and delta [B, H, N] fp32; gradients laid out as K and V are.
    """
    start = tl.program_id(0) * BN
    if WINDOW and not CAUSAL:  # later keys are seen by more queries: the longest go first
        start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BN
    head = tl.program_id(1)
    b = tl.program_id(2)
    page_b = b if PAGE == 0 else 0
    if GATHER:
        k_ptr += b.to(tl.int64) * stride_kb
        v_ptr += b.to(tl.int64) * stride_kb
    if not COPIES:
        q_ptr += b.to(tl.int64) * stride_qb
        grad_ptr += b.to(tl.int64) * stride_ob
    rows = tile_rows(page_rows, start, S, PAGE, BN, GATHER)
    k = load_tile(k_desc, k_ptr, stride_head, stride_row, page_b, head, rows, BN, D, DIM, GATHER)
    v = load_tile(v_desc, v_ptr, stride_head, stride_row, page_b, head, rows, BN, D, DIM, GATHER)
    j = start + tl.arange(0, BN)

    from_query = 0
    to_query = N
    if CAUSAL:
        from_query = tl.maximum(start - offset, 0)
    if WINDOW:
        to_query = tl.minimum(to_query, tl.minimum(start + BN, S) - 1 + window - offset)
    if DOCUMENTS:
        to_query = tl.minimum(to_query, tl.load(beyond_ptr + b * N + tl.minimum(start + BN, S) - 1))
    from_query = from_query // BM * BM
    blocks = tl.maximum((to_query - from_query + BM - 1) // BM, 0)

    grad_k = tl.zeros([BN, D], tl.float32)
    grad_v = tl.zeros([BN, D], tl.float32)
    scale2 = scale * LOG2E
    h = head * GROUP
    first = from_query
    in_row = b.to(tl.int64) * stride_lb
    # Rows behind the last query weigh 0, by lse = inf.
    i = first + tl.arange(0, BM)
    lse = tl.load(lse_ptr + in_row + h * stride_lh + i, mask=i < N, other=float("inf"))
    delta = tl.load(delta_ptr + in_row + h * stride_lh + i, mask=i < N, other=0.0)
    starts = 0
    if DOCUMENTS:
        starts = tl.load(lowest_ptr + b * N + tl.minimum(first + BM, N) - 1)
    for _ in range(GROUP * blocks):  # one loop, so that loads run ahead across heads too
        q_rows = tile_rows(page_rows, first, N, 0, BM, not COPIES)
        q = load_tile(q_desc, q_ptr, stride_qh, stride_qn, b, h, q_rows, BM, D, DIM, not COPIES)
        grad = load_tile(
            grad_desc, grad_ptr, stride_oh, stride_on, b, h, q_rows, BM, D, DIM, not COPIES
        )
        # Small loads are not run ahead by the compiler: fetch the next step's now.
        wraps = first + BM >= to_query
        next_h = tl.minimum(tl.where(wraps, h + 1, h), head * GROUP + GROUP - 1)
        next_first = tl.where(wraps, from_query, first + BM)
        next_i = next_first + tl.arange(0, BM)
        at = in_row + next_h * stride_lh + next_i
        next_lse = tl.load(lse_ptr + at, mask=next_i < N, other=float("inf"))
        next_delta = tl.load(delta_ptr + at, mask=next_i < N, other=0.0)
        next_starts = 0
        if DOCUMENTS:
            next_starts = tl.load(lowest_ptr + b * N + tl.minimum(next_first + BM, N) - 1)
        scores = tl.dot(k, q.T, input_precision=PRECISION)
        weights = tl.exp2(scores * scale2 - (lse * LOG2E)[None, :])
        edge = False
        if CAUSAL:
            edge = first + offset < start + BN - 1
        if WINDOW:
            edge = edge | (first + BM - 1 + offset - window >= start)
        if DOCUMENTS:  # the last query's document is the block's last
            edge = edge | (starts > start)
        if edge:  # most tiles are seen whole, and comparing costs a tenth of a tile's time
            lowest = i
            if DOCUMENTS:
                lowest = tl.load(lowest_ptr + b * N + i, mask=i < N, other=S)
            seen = visible(
                i[None, :], j[:, None], lowest[None, :], offset, window, S,
                CAUSAL, WINDOW, DOCUMENTS,
            )  # fmt: skip
            weights = tl.where(seen, weights, 0.0)
        grad_weights = tl.dot(v, grad.T, input_precision=PRECISION)
        grad_v = tl.dot(weights.to(grad.dtype), grad, grad_v, input_precision=PRECISION)
        grad_scores = weights * (grad_weights - delta[None, :])
        grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=PRECISION)
        h = next_h
        first = next_first
        i = next_i
        lse = next_lse
        delta = next_delta
        starts = next_starts

    dims = tl.arange(0, D)
    at = page_b * stride_gb.to(tl.int64) + head * stride_ghead + dims[None, :]
    at = at + grad_rows(rows, BN, GATHER)[:, None] * stride_grow
    inside = (j < S)[:, None] & (dims < DIM)[None, :]
    before = tl.load(grad_k_ptr + at, mask=inside).to(tl.float32)
    tl.store(
        grad_k_ptr + at, (before + grad_k * scale).to(grad_k_ptr.dtype.element_ty), mask=inside
    )
    before = tl.load(grad_v_ptr + at, mask=inside).to(tl.float32)
    tl.store(grad_v_ptr + at, (before + grad_v).to(grad_v_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _walk_keys(
    acc, q, grad, lse2, delta, lo, hi, i, lowest,
    k_desc, v_desc, k_ptr, v_ptr, page_rows, grad_k_ptr, grad_v_ptr,
    stride_head, stride_row, stride_ghead, stride_grow,
    b, head, scale, offset, window, S,
    BN: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    GATHER: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, ATOMIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of queries over keys [lo, hi), added to acc [BM, D] (less the scale)."""
    rows = tile_rows(page_rows, lo, S, PAGE, BN, GATHER)
    for start in range(lo, hi, BN):
        k = load_tile(k_desc, k_ptr, stride_head, stride_row, b, head, rows, BN, D, DIM, GATHER)
        v = load_tile(v_desc, v_ptr, stride_head, stride_row, b, head, rows, BN, D, DIM, GATHER)
        j = start + tl.arange(0, BN)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        grad_weights = tl.dot(grad, v.T, input_precision=PRECISION)
        weights = tl.exp2(scores * (scale * LOG2E) - lse2[:, None])
        grad_scores = weights * (grad_weights - delta[:, None])
        if MASKED:
            seen = visible(
                i[:, None], j[None, :], lowest[:, None], offset, window, S,
                CAUSAL, WINDOW, DOCUMENTS,
            )  # fmt: skip
            weights = tl.where(seen, weights, 0.0)
            grad_scores = tl.where(seen, grad_scores, 0.0)
            k = tl.where((j < S)[:, None], k, 0.0)  # memory behind the last key may hold NaN
        acc = tl.dot(grad_scores.to(k.dtype), k, acc, input_precision=PRECISION)
        if ATOMIC:
            dims = tl.arange(0, D)
            at = head * stride_ghead + grad_rows(rows, BN, GATHER)[:, None] * stride_grow
            at = at + dims[None, :]
            inside = (j < S)[:, None] & (dims < DIM)[None, :]
            term = tl.dot(grad_scores.to(q.dtype).T, q, input_precision=PRECISION) * scale
            tl.atomic_add(grad_k_ptr + at, term.to(grad_k_ptr.dtype.element_ty), mask=inside)
            term = tl.dot(weights.to(grad.dtype).T, grad, input_precision=PRECISION)
            tl.atomic_add(grad_v_ptr + at, term.to(grad_v_ptr.dtype.element_ty), mask=inside)
        rows = tile_rows(page_rows, start + BN, S, PAGE, BN, GATHER)
    return acc


@triton.jit
def query_grads_kernel(
    q_ptr, grad_ptr, k_desc, v_desc, k_ptr, v_ptr, page_rows, lowest_ptr,
    lse_ptr, delta_ptr, state_ptr, grad_q_ptr, grad_k_ptr, grad_v_ptr,
    stride_qb, stride_qh, stride_qn, stride_ob, stride_oh, stride_on,
    stride_kb, stride_head, stride_row, stride_ghead, stride_grow,
    stride_sb, stride_sn, stride_sh, stride_gb, stride_gn, stride_gh, stride_lb, stride_lh,
    N, S, scale, offset, window,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, GATHER: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, HAS_STATE: tl.constexpr, ATOMIC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_q of a part, added to the state of the parts before it (fp32).

    q and grad_out [B, H, N, DIM]; state and grad_q any strides; lse and delta [B, H, N] fp32.
    """
    block = tl.program_id(0)
    if CAUSAL:  # later blocks see more keys: the longest go first
        block = tl.num_programs(0) - 1 - block
    h = tl.program_id(1)
    b = tl.program_id(2)
    first = block * BM
    last = tl.minimum(first + BM, N) - 1
    i = first + tl.arange(0, BM)
    dims = tl.arange(0, D)
    inside = (i < N)[:, None] & (dims < DIM)[None, :]
    wide_b, wide_h, tokens = b.to(tl.int64), h.to(tl.int64), i.to(tl.int64)[:, None]
    q_at = wide_b * stride_qb + wide_h * stride_qh + tokens * stride_qn + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    grad_at = wide_b * stride_ob + wide_h * stride_oh + tokens * stride_on + dims[None, :]
    grad = tl.load(grad_ptr + grad_at, mask=inside, other=0.0)
    lse_at = wide_b * stride_lb + h * stride_lh + i
    lse2 = tl.load(lse_ptr + lse_at, mask=i < N, other=float("inf")) * LOG2E
    delta = tl.load(delta_ptr + lse_at, mask=i < N, other=0.0)
    lowest = i
    if DOCUMENTS:
        lowest = tl.load(lowest_ptr + b * N + i, mask=i < N, other=S)
    begin, inner, outer, end = key_range(
        lowest_ptr, b, first, last, offset, window, N, S, BN, CAUSAL, WINDOW, DOCUMENTS
    )
    acc = tl.zeros([BM, D], tl.float32)
    head = h // GROUP
    page_b = b if PAGE == 0 else 0
    if GATHER:
        k_ptr += b.to(tl.int64) * stride_kb
        v_ptr += b.to(tl.int64) * stride_kb
    if WINDOW or DOCUMENTS:
        acc = _walk_keys(
            acc, q, grad, lse2, delta, begin, inner, i, lowest,
            k_desc, v_desc, k_ptr, v_ptr, page_rows, grad_k_ptr, grad_v_ptr,
            stride_head, stride_row, stride_ghead, stride_grow,
            page_b, head, scale, offset, window, S,
            BN, D, DIM, PAGE, GATHER, True, CAUSAL, WINDOW, DOCUMENTS, ATOMIC, PRECISION,
        )  # fmt: skip
    acc = _walk_keys(
        acc, q, grad, lse2, delta, inner, outer, i, lowest,
        k_desc, v_desc, k_ptr, v_ptr, page_rows, grad_k_ptr, grad_v_ptr,
        stride_head, stride_row, stride_ghead, stride_grow,
        page_b, head, scale, offset, window, S,
        BN, D, DIM, PAGE, GATHER, False, CAUSAL, WINDOW, DOCUMENTS, ATOMIC, PRECISION,
    )  # fmt: skip
    acc = _walk_keys(
        acc, q, grad, lse2, delta, outer, end, i, lowest,
        k_desc, v_desc, k_ptr, v_ptr, page_rows, grad_k_ptr, grad_v_ptr,
        stride_head, stride_row, stride_ghead, stride_grow,
        page_b, head, scale, offset, window, S,
        BN, D, DIM, PAGE, GATHER, True, CAUSAL, WINDOW, DOCUMENTS, ATOMIC, PRECISION,
    )  # fmt: skip
    acc = acc * scale
    if HAS_STATE:
        state_at = wide_b * stride_sb + wide_h * stride_sh + tokens * stride_sn + dims[None, :]
        acc += tl.load(state_ptr + state_at, mask=inside, other=0.0)
    at = wide_b * stride_gb + wide_h * stride_gh + tokens * stride_gn + dims[None, :]
    tl.store(grad_q_ptr + at, acc.to(grad_q_ptr.dtype.element_ty), mask=inside)
