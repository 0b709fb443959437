"""What `oomb demo` is given: every option checked, and model and text loaded, before any work."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from oomb_assets import demo_model_dir, demo_text

# With --text, one part in HELD_OUT_SHARE of its tokens, at the end, is never trained on.
HELD_OUT_SHARE = 8
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class InputError(Exception):
    """Something the user gave cannot be used; the message is one sentence that says what to do."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The command line of `oomb demo`; sizes are in tokens."""

    text: Path | None = None
    model: Path | None = None
    context: int = 16384
    chunk: int = 2048
    page: int = 128
    steps: int = 3
    lr: float = 5e-4
    device: str = "auto"
    json: Path | None = None
    out: Path = Path("demo.oomb")


@dataclass(frozen=True, kw_only=True)
class DemoInputs:
    """Options and what they name.

    Attributes:
        model: causal LM in fp32 on `device`, attention by PyTorch's sdpa. In eval mode: dropout
            would give the two runs different random numbers.
        train: token ids [N] to train on, N >= context.
        held_out: token ids [M] never trained on, 2 <= M <= context.
    """

    options: DemoOptions
    device: torch.device
    model: Any
    train: torch.Tensor
    held_out: torch.Tensor
    train_name: str
    held_out_name: str


def load(options: DemoOptions) -> DemoInputs:
    """Check `options` and load what they name, cheapest checks first.

    Args:
        options: the command line.

    Returns:
        Model and text, ready to train.

    Raises:
        InputError: an option cannot be used.
    """
    _check_numbers(options)
    device = _device(options.device)
    for flag, path in (("--json", options.json), ("--out", options.out)):
        if path is not None:
            _check_writable(flag, path)
    if options.json is not None and options.json.resolve() == options.out.resolve():
        raise InputError(f"--json and --out must be two files, both are {options.out}.")
    text = None if options.text is None else _read_text(options.text)
    folder = demo_model_dir() if options.model is None else options.model
    _check_folder(folder)
    config, tokenizer = _load_config(folder), _load_tokenizer(folder)
    _check_positions(config, options.context)
    if text is None:
        train = _encode(tokenizer, demo_text("finetune"))
        held_out = _encode(tokenizer, demo_text("heldout"))[: options.context]
        names = "Matthew and Luke (King James Bible)", "Mark"
        _check_length(len(train), options.context, names[0], options.context)
    else:
        tokens = _encode(tokenizer, text)
        # The smallest n whose rest, n - max(2, n // HELD_OUT_SHARE), is at least the context.
        needed = (options.context - 1) * HELD_OUT_SHARE // (HELD_OUT_SHARE - 1) + 1
        needed = max(needed, options.context + 2)
        name = str(options.text)
        _check_length(len(tokens), needed, name, options.context)
        cut = len(tokens) - max(2, len(tokens) // HELD_OUT_SHARE)
        train, held_out = tokens[:cut], tokens[cut:][: options.context]
        names = name, f"the end of {options.text.name}"
    vocab_size = config.get_text_config().vocab_size
    highest = int(torch.cat((train, held_out)).max())
    if highest >= vocab_size:
        raise InputError(
            f"The tokenizer in {folder} gives token {highest}, but its model has {vocab_size} "
            f"entries: they do not belong together."
        )
    return DemoInputs(
        options=options,
        device=device,
        model=_load_model(folder, device),
        train=train,
        held_out=held_out,
        train_name=names[0],
        held_out_name=names[1],
    )


def _check_numbers(options: DemoOptions) -> None:
    for name, least in (("context", 2), ("chunk", 1), ("page", 1), ("steps", 1)):
        value = getattr(options, name)
        if value < least:
            raise InputError(f"--{name} must be at least {least}, got {value}.")
    if options.chunk % options.page:
        below = options.chunk // options.page * options.page
        use = f"{below} or {below + options.page}" if below else f"{options.page}"
        raise InputError(
            f"--chunk must be a multiple of --page, got {options.chunk} and {options.page}: "
            f"use --chunk {use}."
        )
    if not 0 < options.lr < float("inf"):
        raise InputError(f"--lr must be a positive number, got {options.lr}.")


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device must be auto, cpu or cuda, got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda needs a CUDA GPU, and PyTorch sees none here: use cpu.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _check_writable(flag: str, path: Path) -> None:
    folder = path.absolute().parent
    if path.is_dir():
        raise InputError(f"{flag} must name a file, {path} is a folder.")
    if not folder.is_dir():
        raise InputError(f"{flag} {path} cannot be written: there is no folder {folder}.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{flag} {path} cannot be written: permission denied.")


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"--text {path} is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x})"
            ": convert it first."
        ) from error
    except OSError as error:
        raise InputError(f"--text {path} cannot be read: {error.strerror}.") from error
    if not text.strip():
        raise InputError(f"--text {path} is empty.")
    return text


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"--model must be a transformers folder, {folder} {what}.")
    if not (folder / "config.json").is_file():
        raise InputError(f"--model {folder} has no config.json, so it is no transformers folder.")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(
            f"--model {folder} has no tokenizer: save one there with tokenizer.save_pretrained."
        )


def _load_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise InputError(f"The tokenizer in {folder} cannot be read: {_one_line(error)}") from error


def _load_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise InputError(f"{folder}/config.json cannot be used: {_one_line(error)}") from error


def _load_model(folder: Path, device: torch.device) -> Any:
    transformers.logging.disable_progress_bar()  # one model of a few files: ours is enough
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, attn_implementation="sdpa"
        )
    except Exception as error:
        reason = _one_line(error)
        if "scaled_dot_product_attention" in reason:  # what transformers says of it is misleading
            reason = "it has no attention that chunk recurrence could take part in"
        raise InputError(f"The model in {folder} cannot be loaded: {reason}.") from error
    return model.to(device).eval()


def _encode(tokenizer: Any, text: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # longer than the tokenizer's own idea of a maximum
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def _check_positions(config: Any, context: int) -> None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise InputError(
            f"--context {context} is more than the {limit} positions this model was made for: "
            f"use --context {limit} or less."
        )


def _check_length(have: int, needed: int, name: str, context: int) -> None:
    if have < needed:
        kept = ", of which an eighth is kept to test on" if needed > context else ""
        raise InputError(
            f"{name} has {have} tokens, --context {context} needs at least {needed}{kept}: "
            "use a longer text or a shorter context."
        )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
