"""Checks of the benchmarks' options; what cannot be used is an `InputError`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from oomb.demo.inputs import InputError

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
PAGE_DTYPES = {"model": None, "fp8": "fp8"}
NONE = "none"


def check_device(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` names here."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device must be auto, cpu or cuda, got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda needs a CUDA GPU, and PyTorch sees none here: use cpu.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def check_out(path: Path | None) -> None:
    """Refuse a file that could not be written once everything is measured."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise InputError(f"--out must name a file, {path} is a folder.")
    if not folder.is_dir():
        raise InputError(f"--out {path} cannot be written: there is no folder {folder}.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"--out {path} cannot be written: permission denied.")


def check_least(flag: str, value: float, least: float) -> None:
    """Refuse a number below `least`."""
    if not value >= least:
        raise InputError(f"{flag} must be at least {least}, got {value}.")


def check_multiple(flag: str, value: int, of: str, step: int) -> None:
    """Refuse a number that is no multiple of another option's."""
    if value % step:
        below = value // step * step
        use = f"{below} or {below + step}" if below else f"{step}"
        raise InputError(
            f"{flag} must be a multiple of {of}, got {value} and {step}: use {flag} {use}."
        )


def choose(flag: str, value: str, allowed: Iterable[str]) -> str:
    """One of a few words."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise InputError(f"{flag} must be one of {', '.join(allowed)}, got {value!r}.")
    return value


def words(flag: str, text: str, allowed: Iterable[str]) -> list[str]:
    """Words between commas, each one of a few."""
    return [choose(flag, word.strip(), allowed) for word in text.split(",")]


def numbers(flag: str, text: str, least: int = 1) -> list[int]:
    """Whole numbers between commas; `none` is an empty list."""
    if text.strip() == NONE:
        return []
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise InputError(
            f"{flag} must be whole numbers between commas, such as 8192,32768, or {NONE}, "
            f"got {text!r}."
        ) from None
    for number in found:
        check_least(flag, number, least)
    return found


def one_sentence(error: BaseException) -> str:
    """The first sentence of an error's message, with what follows a headline's colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    sentence = text.split(". ")[0].rstrip(".:")
    return (sentence if len(sentence) <= 200 else sentence[:197] + "...") + "."
