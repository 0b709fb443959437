"""The vendor's attention kernels, one call per part.

Both operators return the log-sum-exp beside the output, and their backward takes any output and
log-sum-exp: given those over *all* keys, it yields exactly this part's term of the gradients.
They are called below `scaled_dot_product_attention`, so what that checks is checked here.
"""

from __future__ import annotations

import torch

from oomb.attention.api import Backend, Mask
from oomb.attention.segmentwise import Segmentwise

aten = torch.ops.aten
CPU_OP = "_scaled_dot_product_flash_attention_for_cpu"
CUDA_OP = "_scaled_dot_product_cudnn_attention"
ARGUMENTS = {
    CPU_OP: "query key value dropout_p is_causal attn_mask scale",
    CPU_OP + "_backward": (
        "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale"
    ),
    CUDA_OP: (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
    ),
    CUDA_OP + "_backward": (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q "
        "cum_seq_k max_q max_k dropout_p is_causal scale"
    ),
}
"""Names of the operators' arguments: torch may change private operators from version to version."""
CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CUDA_DTYPES = (torch.bfloat16, torch.float16)
CUDA_MAX_HEAD_DIM = 256


def obstacle(
    device: torch.device, dtype: torch.dtype, head_dims: set[int], *, deterministic: bool
) -> str | None:
    """Look for a reason why these kernels cannot run a model here.

    Args:
        device: where the model lives.
        dtype: dtype of its K and V.
        head_dims: head dims of its layers.
        deterministic: whether every run must give the same bits.

    Returns:
        The reason, as part of a sentence, or None if they can.
    """
    op, dtypes = (CUDA_OP, CUDA_DTYPES) if device.type == "cuda" else (CPU_OP, CPU_DTYPES)
    if device.type not in ("cpu", "cuda"):
        return f"there are no library kernels for device {device.type}"
    for name in (op, op + "_backward"):
        if not hasattr(aten, name):
            return f"torch {torch.__version__} has no operator {name}"
        if _arguments(name) != ARGUMENTS[name]:
            return (
                f"torch {torch.__version__} has an operator {name} with other arguments than are "
                f"known here ({_arguments(name)})"
            )
    if dtype not in dtypes:
        names = ", ".join(str(each) for each in dtypes)
        return f"on {device.type} its dtypes are {names}, the model's K and V are {dtype}"
    if device.type == "cuda":
        if deterministic:
            return "cuDNN's backward is not bit-repeatable and deterministic=True"
        if not torch.backends.cudnn.is_available():
            return "cuDNN is not available"
        wrong = sorted(dim for dim in head_dims if dim % 8 or dim > CUDA_MAX_HEAD_DIM)
        if wrong:
            return f"head_dim must be a multiple of 8 up to {CUDA_MAX_HEAD_DIM}, got {wrong[0]}"
    return None


def _arguments(op: str) -> str:
    return " ".join(each.name for each in getattr(aten, op).default._schema.arguments)


def make_backend(device: torch.device) -> Backend:
    """The backend for a device that `obstacle` passed."""
    return CudnnBackend() if device.type == "cuda" else CpuFlashBackend()


class CpuFlashBackend(Segmentwise):
    """PyTorch's flash attention for CPUs; heads may share keys."""

    name = "library"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        causal = _is_causal(q, k, mask)
        q, k, v = _dense_heads(q, k, v)
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        mask: Mask,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        causal = _is_causal(q, k, mask)
        grad_out, q, k, v, out = _dense_heads(grad_out, q, k, v, out)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, scale=scale
        )


class CudnnBackend(Segmentwise):
    """cuDNN's fused attention; query heads may share keys."""

    name = "library"

    def __init__(self) -> None:
        self._no_dropout: torch.Tensor | None = None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        causal = _is_causal(q, k, mask)
        if _single(q, k):
            return _single_forward(q, k, v, scale)
        q, k, v = _dense_heads(q, k, v)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.reshape(q.shape[:3])

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        mask: Mask,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        causal = _is_causal(q, k, mask)
        if _single(q, k):
            return _single_backward(grad_out, q, k, v, out, lse, scale)
        grad_out, q, k, v, out = _dense_heads(grad_out, q, k, v, out)
        if self._no_dropout is None:  # seed and offset of a dropout that is off
            self._no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse[..., None].contiguous(),
            self._no_dropout,
            self._no_dropout,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            scale=scale,
        )


def _is_causal(q: torch.Tensor, k: torch.Tensor, mask: Mask) -> bool:
    """The operators know full rectangles and causal squares, aligned at the top left."""
    queries, keys = q.shape[2], k.shape[2]
    assert not mask.hides_past(queries), "windows go to a backend that masks them"
    assert not mask.causal or (queries == keys and mask.offset == 0), "causal parts are square"
    return mask.causal


def _dense_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The kernels read the head dim as adjacent numbers, and do not check that it is."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _single(q: torch.Tensor, k: torch.Tensor) -> bool:
    """One query and one key, which cuDNN refuses; the formula is one line."""
    return q.shape[2] == 1 and k.shape[2] == 1


def _per_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1).float()


def _single_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    heads = q.shape[1]
    lse = (q.float() * _per_head(k, heads)).sum(-1) * scale
    return _per_head(v, heads).to(q.dtype), lse


def _single_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, groups = q.shape[1], k.shape[1]
    k_, v_, grad_ = _per_head(k, heads), _per_head(v, heads), grad_out.float()
    weight = torch.exp((q.float() * k_).sum(-1, keepdim=True) * scale - lse[..., None])
    grad_score = weight * (grad_ * (v_ - out.float())).sum(-1, keepdim=True) * scale

    def per_group(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (groups, -1)).sum(2)

    return grad_score * k_, per_group(grad_score * q.float()), per_group(weight * grad_)
