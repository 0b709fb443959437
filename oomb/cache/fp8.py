"""K and V in fp8: eight bits per number, and a scale per page and head.

A scale is a power of two, so that nothing is rounded but the number itself, once: what is read is
exact in the model's dtype, and storing what was read stores the same again. A page that a chunk
border cuts is written by two chunks, and each has a scale of its own.

A chunk attends to itself with its own K and V, and to earlier chunks as their pages hold them, in
both passes alike: a step's gradients are those of one function. Its rounding has derivative 1
(straight-through): what later chunks owe a rounded key is added to the gradient of the key itself.
Reading the own chunk rounded as well made the gradient's error 4 to 7 times as large.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_EXPONENT = -126
"""Of a scale: those of pages that are smaller still would be no normal fp32 numbers."""
EXPONENT_BIAS, MANTISSA_BITS = 127, 23
"""Of fp32."""


def page_scales(x: torch.Tensor, first: int, page_size: int) -> torch.Tensor:
    """The smallest powers of two 2^e at which the pages of x fit.

    Args:
        x: [..., tokens, dim].
        first: logical token number of the first token.
        page_size: tokens of a page.

    Returns:
        fp32 [..., pages], of every page that x touches; NaN where a number is not finite, since
        fp8 cannot say infinity.
    """
    largest = x.abs().amax(-1)
    before, tokens = first % page_size, first % page_size + x.shape[-2]
    padded = torch.nn.functional.pad(largest, (before, -tokens % page_size))
    largest = padded.unflatten(-1, (-1, page_size)).amax(-1)
    mantissa, exponent = torch.frexp(largest.to(_wide(x)) / LARGEST)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(SMALLEST_EXPONENT, -SMALLEST_EXPONENT)
    scales = (exponent + EXPONENT_BIAS << MANTISSA_BITS).view(torch.float32)
    return scales.masked_fill(~largest.isfinite(), float("nan"))


def quantise(x: torch.Tensor, first: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to fp8, to nearest.

    Args:
        x: [..., tokens, dim].
        first: logical token number of the first token.
        page_size: tokens of a page.

    Returns:
        Numbers, fp8 in the shape of x, and scales, fp32 [..., pages].
    """
    scales = page_scales(x, first, page_size)
    return (x.to(_wide(x)) / _by_token(scales, x, first, page_size)).to(FP8), scales


def rounded(x: torch.Tensor, first: int, page_size: int) -> torch.Tensor:
    """What pages give back of x [..., tokens, dim]; in its dtype."""
    numbers, scales = quantise(x, first, page_size)
    return (numbers.to(_wide(x)) * _by_token(scales, x, first, page_size)).to(x.dtype)


def write(
    numbers: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, start: int, page_size: int
) -> None:
    """Quantise tokens into a slot.

    Args:
        numbers: fp8 [slot's tokens, heads, dim].
        scales: fp32 [pages, parts, heads].
        x: [heads, tokens, dim].
        start: token of the slot that is the first of x.
        page_size: tokens of a page.
    """
    new, new_scales = quantise(x, start, page_size)
    numbers[start : start + x.shape[1]].copy_(new.transpose(0, 1))
    page, cut = divmod(start, page_size)
    new_scales = new_scales.transpose(0, 1)
    if cut:
        scales[page, 1].copy_(new_scales[0])
        page, new_scales = page + 1, new_scales[1:]
    scales[page : page + len(new_scales)].copy_(new_scales[:, None])


def read(numbers: torch.Tensor, scales: torch.Tensor, cut: int, out: torch.Tensor) -> None:
    """What whole pages hold.

    Args:
        numbers: fp8 [K|V, pages, tokens of a page, heads, dim].
        scales: fp32 [K|V, pages, parts, heads].
        cut: token of a page at which another chunk may have gone on; 0 if none.
        out: in the model's dtype, in the shape of `numbers`.
    """
    out.copy_(numbers)
    scales = scales[:, :, :, None, :, None]
    if not cut:
        out.mul_(scales[:, :, 0])
        return
    out[:, :, :cut].mul_(scales[:, :, 0])
    out[:, :, cut:].mul_(scales[:, :, 1])


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_token(scales: torch.Tensor, x: torch.Tensor, first: int, page_size: int) -> torch.Tensor:
    """Scales of pages [..., pages] as [..., tokens, 1]."""
    before = first % page_size
    each = scales[..., None].expand(*scales.shape, page_size).flatten(-2)
    return each[..., before : before + x.shape[-2], None]
