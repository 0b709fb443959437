"""Exercise: how many programs share a multiprocessor."""

from collections.abc import Callable

from oomb_widgets.verdict import Verdict, call, hint

_SHARED = 227 * 1024
_TILES = ((128, 64, 2), (128, 64, 3), (64, 64, 3), (64, 32, 2))


def judge_programs(answer: Callable) -> Verdict:
    """`answer(queries, keys, stages, dim)` returns programs per multiprocessor, bf16."""
    for queries, keys, stages in _TILES:
        dim = 128
        block, tile = 2 * queries * dim, 2 * keys * dim
        true = _SHARED // (block + stages * 2 * tile)
        got = float(call(answer, queries, keys, stages, dim))
        if got == true:
            continue
        wrong = {
            "That is a fraction: half a program does not run.": _SHARED
            / (block + stages * 2 * tile),
            "Each stage holds a tile of K and one of V: that counts one of them.": _SHARED
            // (block + stages * tile),
            "That leaves out the block of queries, which stays in shared memory too.": _SHARED
            // (stages * 2 * tile),
            "That counts one stage; tiles on their way take room as well.": _SHARED
            // (block + 2 * tile),
            "A bf16 number takes two bytes.": _SHARED // (2 * (block + stages * 2 * tile)),
        }
        why = hint(got, wrong) or "Add up bytes: the block of queries, and K and V of each stage."
        return Verdict(
            False,
            f"{why} (For {queries} queries, {keys} keys, {stages} stages: you say {got:g}, and it "
            f"is {true}.)",
        )
    return Verdict(True, "Right: the shipped forward tile, 128 x 64 with 2 stages, runs in pairs.")
