"""Train the small model that `oomb demo` ships with, by chunk recurrence, on the shipped text.

    python -m oomb.train.demo_model --out assets/demo_model --device cuda

Writes a transformers folder (weights rounded to fp16, tokenizer) and training.json, which holds
the loss curve and the held-out loss beside that of a 3-gram model on the same tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import oomb
from oomb.train.ngram import KneserNey
from oomb_assets import TEXT_PARTS, demo_text

END = "<|endoftext|>"

# (share of training at which it starts, tokens per window): short windows first, since a tiny
# model learns words before it can use 16K tokens of context; every batch has as many tokens.
WINDOWS = ((0.0, 1024), (0.6, 4096), (0.85, 16384))


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `vocab_size` entries, learned from `text`; any UTF-8 text encodes."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)


def build_model(vocab_size: int) -> LlamaForCausalLM:
    """A Llama with 4 layers, 4 heads of 16 on 2 KV heads, tied embeddings: 1.7 M parameters.

    Attention over 16K tokens takes most of the time of `oomb demo` on a CPU, so the heads are
    narrow for so wide a model.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=131072,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def random_windows(
    tokens: torch.Tensor, length: int, rows: int, generator: torch.Generator
) -> torch.Tensor:
    """`rows` windows of `length` tokens that start anywhere in tokens [N]: [rows, length]."""
    starts = torch.randint(len(tokens) - length + 1, (rows, 1), generator=generator)
    index = starts + torch.arange(length)
    return tokens[index.to(tokens.device)]


def cut(tokens: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
    """Consecutive windows [1, <= length] that cover tokens [N]; a tail below 3 tokens is left."""
    for start in range(0, len(tokens) - 2, length):
        window = tokens[start : start + length]
        if len(window) > 2:
            yield window[None]


def held_out_loss(engine: oomb.Engine, tokens: torch.Tensor, length: int) -> float:
    """Mean loss (nats) over windows of `length`, each from its third token on.

    The first two tokens of a window are left out because a 3-gram model has no context for them.
    """
    total, count = 0.0, 0
    for ids in cut(tokens, length):
        labels = ids.clone()
        labels[:, :2] = -100
        total += float(engine.evaluate(ids, labels=labels)) * (ids.shape[1] - 2)
        count += ids.shape[1] - 2
    return total / count


def three_gram_loss(three_gram: KneserNey, tokens: torch.Tensor, length: int) -> float:
    """What held_out_loss measures, for the 3-gram model: same windows, same counted tokens."""
    total, count = 0.0, 0
    for ids in cut(tokens, length):
        total += three_gram.loss(ids[0].cpu().numpy()) * (ids.shape[1] - 2)
        count += ids.shape[1] - 2
    return total / count


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices, and leave norms alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def learning_rate(progress: float, peak: float, warmup: float = 0.02) -> float:
    """Linear warmup over the first `warmup` of training, then a cosine down to 2 % of `peak`."""
    if progress < warmup:
        return peak * max(progress, warmup / 20) / warmup
    cosine = 0.5 + 0.5 * math.cos(math.pi * (progress - warmup) / (1 - warmup))
    return peak * (0.02 + 0.98 * cosine)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config and weights, rounded to fp16."""
    copy.deepcopy(model).half().save_pretrained(folder)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop here if sooner")
    parser.add_argument("--batch-tokens", type=int, default=32768, help="tokens in each step")
    parser.add_argument("--longest", type=int, default=16384, help="longest window, in tokens")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=3.0)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--backend", default="auto", help="attention backend of the engine")
    parser.add_argument("--evaluations", type=int, default=25, help="validations on the way")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, keep the best checkpoint by validation loss, and return what training.json holds."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    device, began = torch.device(args.device), time.monotonic()
    last, report_file = args.out / "last", args.out / "training.json"
    args.out.mkdir(parents=True, exist_ok=True)
    transformers.logging.disable_progress_bar()

    text = {part: demo_text(part) for part in TEXT_PARTS}
    tokenizer = train_tokenizer(text["pretrain"], args.vocab)
    tokenizer.save_pretrained(args.out)
    tokens = {
        part: torch.tensor(tokenizer(text[part], verbose=False)["input_ids"], device=device)
        for part in TEXT_PARTS
    }
    print({part: len(ids) for part, ids in tokens.items()}, "tokens", flush=True)
    three_gram = KneserNey(tokens["pretrain"].cpu().numpy(), args.vocab)

    model = build_model(args.vocab).to(device, getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(
        parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.98), fused=True
    )
    report: dict[str, Any] = {
        "command": "python -m oomb.train.demo_model " + " ".join(sys.argv[1:]),
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "oomb": oomb.__version__,
        },
        "parameters": model.num_parameters(),
        "tokens": {part: len(ids) for part, ids in tokens.items()},
        "validation_loss_3gram": three_gram_loss(three_gram, tokens["validation"], args.longest),
        "curve": [],
    }
    best, step, evaluated, losses = math.inf, 0, 0, []
    # Windows of up to 4K tokens are one chunk; the longest are four, so pages carry gradients.
    engine = oomb.Engine(
        model,
        oomb.EngineConfig(
            chunk_size=4096,
            page_size=128,
            attention_backend=args.backend,
            activation_policy="keep",
        ),
    )
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU: training needs no more
    with engine:
        while True:
            minutes = (time.monotonic() - began) / 60
            progress = min(1.0, max(step / args.steps, minutes / args.minutes))
            if progress * args.evaluations >= evaluated + 1 or progress == 1.0:
                evaluated = int(progress * args.evaluations)
                loss = held_out_loss(engine, tokens["validation"], args.longest)
                train_loss = float(torch.stack(losses).mean()) if losses else math.nan
                losses.clear()
                report["curve"].append({"step": step, "train": train_loss, "validation": loss})
                print(
                    f"{minutes:5.2f} min  step {step:5d}  train {train_loss:.4f}  "
                    f"validation {loss:.4f}  3-gram {report['validation_loss_3gram']:.4f}"
                    + ("  best" if loss < best else ""),
                    flush=True,
                )
                save(model, last)
                if loss < best:
                    best, report["best_step"] = loss, step
                    save(model, args.out)
                report_file.write_text(json.dumps(report, indent=1) + "\n")
            if progress == 1.0:
                break
            length = min([w for start, w in WINDOWS if progress >= start][-1], args.longest)
            rows = max(1, args.batch_tokens // length)
            ids = random_windows(tokens["pretrain"], length, rows, generator)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress, args.lr)
            losses.append(engine.step(ids).loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
    report["steps"], report["seconds"] = step, round(time.monotonic() - began, 1)

    # The figures are those of the rounded weights that ship.
    torch.set_float32_matmul_precision("highest")
    model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device)
    with oomb.Engine(model, oomb.EngineConfig(chunk_size=4096, page_size=128)) as engine:
        report["heldout_loss"] = held_out_loss(engine, tokens["heldout"], args.longest)
    report["heldout_loss_3gram"] = three_gram_loss(three_gram, tokens["heldout"], args.longest)
    report_file.write_text(json.dumps(report, indent=1) + "\n")
    shutil.rmtree(last)
    return report


def main() -> None:
    """Train and print the held-out loss beside the 3-gram model's."""
    args = parse_args()
    report = train(args)
    print(
        f"held out: {report['heldout_loss']:.4f} nats a token, "
        f"3-gram {report['heldout_loss_3gram']:.4f}; written to {args.out}"
    )


if __name__ == "__main__":
    main()
