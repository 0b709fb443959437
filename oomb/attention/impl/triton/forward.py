"""Forward: one program computes a block of queries of one head over all keys of a part."""

import triton
import triton.language as tl

from oomb.attention.impl.triton.primitives import key_range, load_tile, tile_rows, visible

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _softmax_over(
    acc, top, total, q, lo, hi, i, lowest,
    k_desc, v_desc, k_ptr, v_ptr, stride_head, stride_row, page_rows,
    b, head, scale, offset, window, S,
    BN: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    GATHER: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [lo, hi): updates acc [BM, D], top and total [BM]."""
    rows = tile_rows(page_rows, lo, S, PAGE, BN, GATHER)
    for start in range(lo, hi, BN):
        k = load_tile(k_desc, k_ptr, stride_head, stride_row, b, head, rows, BN, D, DIM, GATHER)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            j = start + tl.arange(0, BN)
            seen = visible(
                i[:, None], j[None, :], lowest[:, None], offset, window, S,
                CAUSAL, WINDOW, DOCUMENTS,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        safe = new_top
        if MASKED:  # a query that has seen nothing yet: exp2(-inf - 0) is the 0 it should weigh
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * scale - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        v = load_tile(v_desc, v_ptr, stride_head, stride_row, b, head, rows, BN, D, DIM, GATHER)
        if MASKED:  # memory behind the last key may hold NaN, and 0 * NaN is NaN
            v = tl.where((start + tl.arange(0, BN) < S)[:, None], v, 0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
        rows = tile_rows(page_rows, start + BN, S, PAGE, BN, GATHER)
    return acc, top, total


@triton.jit
def attend_kernel(
    q_ptr, k_desc, v_desc, k_ptr, v_ptr, page_rows, lowest_ptr,
    state_ptr, state_lse_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_head, stride_row,
    stride_sb, stride_sn, stride_ob, stride_on, stride_lb, stride_lh,
    N, S, scale, offset, window,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, GATHER: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, HAS_STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of a part, merged with the state of the parts before it.

    q [B, H, N, DIM]; K and V [B or 1, G, rows, DIM]; state (fp32) and out [B, N, H, DIM];
    lse [B, H, N] fp32, natural log.
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
    q_at = b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    q = tl.load(
        q_ptr + q_at + i.to(tl.int64)[:, None] * stride_qn + dims[None, :], mask=inside, other=0.0
    )
    lowest = i
    if DOCUMENTS:
        lowest = tl.load(lowest_ptr + b * N + i, mask=i < N, other=S)
    begin, inner, outer, end = key_range(
        lowest_ptr, b, first, last, offset, window, N, S, BN, CAUSAL, WINDOW, DOCUMENTS
    )
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    scale2 = scale * LOG2E
    head = h // GROUP
    page_b = b if PAGE == 0 else 0
    if GATHER:
        k_ptr += b.to(tl.int64) * stride_kb
        v_ptr += b.to(tl.int64) * stride_kb
    if WINDOW or DOCUMENTS:
        acc, top, total = _softmax_over(
            acc, top, total, q, begin, inner, i, lowest,
            k_desc, v_desc, k_ptr, v_ptr, stride_head, stride_row, page_rows,
            page_b, head, scale2, offset, window, S,
            BN, D, DIM, PAGE, GATHER, True, CAUSAL, WINDOW, DOCUMENTS, PRECISION,
        )  # fmt: skip
    acc, top, total = _softmax_over(
        acc, top, total, q, inner, outer, i, lowest,
        k_desc, v_desc, k_ptr, v_ptr, stride_head, stride_row, page_rows,
        page_b, head, scale2, offset, window, S,
        BN, D, DIM, PAGE, GATHER, False, CAUSAL, WINDOW, DOCUMENTS, PRECISION,
    )  # fmt: skip
    acc, top, total = _softmax_over(
        acc, top, total, q, outer, end, i, lowest,
        k_desc, v_desc, k_ptr, v_ptr, stride_head, stride_row, page_rows,
        page_b, head, scale2, offset, window, S,
        BN, D, DIM, PAGE, GATHER, True, CAUSAL, WINDOW, DOCUMENTS, PRECISION,
    )  # fmt: skip

    nothing = total == 0.0
    lse = tl.where(nothing, float("-inf"), top * LN2 + tl.log(tl.where(nothing, 1.0, total)))
    out = acc / tl.where(nothing, 1.0, total)[:, None]
    lse_at = b.to(tl.int64) * stride_lb + h * stride_lh + i
    tokens = i.to(tl.int64)[:, None]
    within_token = h * DIM + dims[None, :]
    if HAS_STATE:
        before = tl.load(state_lse_ptr + lse_at, mask=i < N, other=float("-inf"))
        high = tl.maximum(before, lse)
        high = tl.where(high == float("-inf"), 0.0, high)
        old, new = tl.exp(before - high), tl.exp(lse - high)
        both = tl.where(old + new == 0.0, 1.0, old + new)
        state = tl.load(
            state_ptr + b.to(tl.int64) * stride_sb + tokens * stride_sn + within_token,
            mask=inside & (before != float("-inf"))[:, None],  # never written where none was seen
            other=0.0,
        )
        out = (state * old[:, None] + out * new[:, None]) / both[:, None]
        lse = tl.where(old + new == 0.0, float("-inf"), high + tl.log(both))
    tl.store(
        out_ptr + b.to(tl.int64) * stride_ob + tokens * stride_on + within_token,
        out.to(out_ptr.dtype.element_ty),
        mask=inside,
    )
    tl.store(lse_ptr + lse_at, lse, mask=i < N)
