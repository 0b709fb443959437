"""Exercise: the bytes that still grow with every token."""

from collections.abc import Callable
from types import SimpleNamespace

from oomb_widgets.verdict import Verdict, call, hint

_MODELS = (
    SimpleNamespace(
        hidden_size=320,
        num_hidden_layers=7,
        num_attention_heads=10,
        num_key_value_heads=2,
        head_dim=32,
    ),
    SimpleNamespace(
        hidden_size=960,
        num_hidden_layers=11,
        num_attention_heads=15,
        num_key_value_heads=3,
        head_dim=64,
    ),
)


def judge_page_bytes(answer: Callable) -> Verdict:
    """`answer(config)` returns bytes per token of bf16 K, V pages and fp32 page gradients."""
    for model in _MODELS:
        layers, heads = model.num_hidden_layers, model.num_attention_heads
        kv = layers * model.num_key_value_heads * model.head_dim
        true = 2 * kv * (2 + 4)
        got = float(call(answer, model))
        if got == true:
            continue
        wrong = {
            "That counts the query heads. Grouped-query attention stores one K and one V for "
            "each of num_key_value_heads.": true / model.num_key_value_heads * heads,
            "That takes hidden_size for the width of one head; it is that of all query heads "
            "together.": true * heads,
            "That is half: every token stores a K and a V.": true / 2,
            "That is one layer: each layer has pages of its own.": true / layers,
            "Each number in a page is 2 bytes and has a gradient of 4 bytes: 6 bytes for a "
            "number, and one of them is missing.": 2 * kv * 2,
            "That counts the gradients only; the pages take 2 bytes a number more.": 2 * kv * 4,
            "That keeps K and V in fp32; pages have the model's dtype, bf16.": 2 * kv * (4 + 4),
            "That counts numbers, not bytes.": 2 * kv,
        }
        why = hint(got, wrong) or "Count one token: layers, then K and V, then bytes for each."
        return Verdict(
            False,
            f"{why} (For {layers} layers, {model.num_key_value_heads} K/V heads of "
            f"{model.head_dim}: you say {got:g} bytes, and it is {true:g}.)",
        )
    return Verdict(True, "Right for every model tried.")
