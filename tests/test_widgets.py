"""The teaching helpers: guesses without a reader, checked exercises, pictures with something on."""

import io
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy, pad

pytest.importorskip("jupyter_client", reason="needs Jupyter, of the extra 'test'")
from jupyter_client.manager import start_new_kernel

import oomb_widgets as w
from oomb_widgets.exercise_recurrence import _detached, _one_chunk_alive, _whole
from oomb_widgets.predict import parse_number

# --- predict ---------------------------------------------------------------------------------


def _reader(monkeypatch, *lines):
    answers = iter(lines)
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))


@pytest.mark.parametrize("error", [EOFError(), OSError("no stdin"), NotImplementedError()])
def test_predict_without_a_reader_shows_the_question_and_returns_none(monkeypatch, capsys, error):
    def nobody(prompt):
        raise error

    monkeypatch.setattr("builtins.input", nobody)
    assert w.predict("How many bytes?", "MB") is None
    assert capsys.readouterr().out == "How many bytes? [MB] (no guess)\n"


def test_predict_returns_the_guess(monkeypatch):
    _reader(monkeypatch, "32k")
    assert w.predict("How long?", "tokens") == 32_000


def test_predict_may_be_skipped(monkeypatch):
    _reader(monkeypatch, "  ")
    assert w.predict("How long?") is None


def test_predict_asks_again_after_something_that_is_no_number(monkeypatch, capsys):
    _reader(monkeypatch, "a lot", "1e-7")
    assert w.predict("How far?") == 1e-7
    assert "'a lot' is not a number" in capsys.readouterr().out


def test_predict_asks_the_reader_of_a_notebook():
    manager, client = start_new_kernel()
    shown, asked = [], []

    def answer(message):
        asked.append(message["content"]["prompt"])
        client.input("3")

    try:
        client.execute_interactive(
            "from oomb_widgets import predict; print(predict('How many?', 'chunks') + 1)",
            allow_stdin=True,
            stdin_hook=answer,
            output_hook=lambda message: shown.append(message["content"].get("text", "")),
            timeout=120,
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert asked == ["How many? [chunks] (a number, or Enter to skip) "]
    assert "4.0" in "".join(shown)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-0.5", -0.5),
        (".5", 0.5),
        ("1e-7", 1e-7),
        ("1.5M", 1.5e6),
        ("40%", 0.4),
        ("1,024", 1024),
        ("1,234,567.5", 1234567.5),
        ("12 000", 12_000),
        ("12\u202f000", 12_000),
        ("1_000", 1000),
        ("64K tokens", 64_000),
        (" 12 000 tokens ", 12_000),
        ("1 token", 1),
        ("20 k", 20_000),
    ],
)
def test_numbers_are_read_as_people_write_them(text, value):
    assert parse_number(text, "tokens") == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    ["", "many", "1.2.3", "3 4", "e5", ".", "0,5", "1,5", "0,500", "12,3456", "1,,000", "3 GB",
     "k", "tokens", "1,024 000 0"],
)  # fmt: skip
def test_other_text_is_no_number(text):
    with pytest.raises(ValueError, match="is not a number"):
        parse_number(text, "tokens")


def test_a_decimal_comma_is_asked_again(monkeypatch, capsys):
    _reader(monkeypatch, "0,5", "0.5 times")
    assert w.predict("How much?", "times") == 0.5
    assert "'0,5' is not a number; write for instance 12, 0.5," in capsys.readouterr().out


def test_reveal_sets_guess_beside_measurement(capsys):
    w.reveal(10.0, 2.5, "MB")
    assert capsys.readouterr().out == "measured: 2.5 MB\nyour guess: 10 MB, 4 times too high\n"
    w.reveal(None, 2.5, "MB")
    assert capsys.readouterr().out == "measured: 2.5 MB\n"
    w.reveal(0.0, 12_345.6)
    assert capsys.readouterr().out == "measured: 12,346\nyour guess: 0\n"
    w.reveal(2.0, 3, exact=True)
    assert capsys.readouterr().out == "measured: 3\nyour guess: 2, not this time\n"


# --- check -----------------------------------------------------------------------------------


def _empty(*args):
    return None


def _dots(*args):
    return ...


def _todo(*args):
    raise NotImplementedError


@pytest.mark.parametrize("exercise", ["page_bytes", "chunked_loss", "recurrent_step"])
@pytest.mark.parametrize("answer", [None, ..., _empty, _dots, _todo])
def test_an_empty_answer_is_not_yet(exercise, answer, capsys):
    w.check(exercise, answer)
    assert capsys.readouterr().out.startswith("Not yet")


def test_an_answer_that_raises_is_told_so():
    verdict = w.judge("page_bytes", lambda config: config.no_such_field)
    assert not verdict.passed
    assert "AttributeError" in verdict.message


def test_an_unknown_exercise_is_refused():
    with pytest.raises(ValueError, match="no exercise 'nothing'"):
        w.check("nothing", None)


@pytest.mark.parametrize("answer", [344064, float("nan"), torch.zeros(1)])
@pytest.mark.parametrize("exercise", ["page_bytes", "chunked_loss", "recurrent_step"])
def test_a_result_in_place_of_the_function_is_told_so(exercise, answer):
    verdict = w.judge(exercise, answer)
    assert not verdict.passed
    assert f"function, not its result: check('{exercise}', {exercise})" in verdict.message


def _kv(config):
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda c: _kv(c) * 6, None),
        (lambda c: _kv(c) // c.head_dim * c.hidden_size // c.num_attention_heads * 6, None),
        (lambda c: _kv(c) // c.head_dim * c.hidden_size * 6, "width of one head"),
        (lambda c: _kv(c) * 6 * c.num_attention_heads // c.num_key_value_heads, "query heads"),
        (lambda c: _kv(c) * 3, "a K and a V"),
        (lambda c: _kv(c) * 6 // c.num_hidden_layers, "one layer"),
        (lambda c: _kv(c) * 2, "has a gradient of 4 bytes"),
        (lambda c: _kv(c) * 4, "gradients only"),
        (lambda c: _kv(c) * 8, "in fp32"),
        (lambda c: _kv(c), "numbers, not bytes"),
        (lambda c: 1, "Count one token"),
        (lambda c: float("nan"), "Count one token"),
    ],
)
def test_page_bytes_names_the_mistake(answer, said):
    verdict = w.judge("page_bytes", answer)
    assert verdict.passed == (said is None)
    assert said is None or said in verdict.message


def _targets(labels, by=1):
    return pad(labels[by:], (0, by), value=-100)


def _pieces(logits, targets, chunk):
    return list(zip(logits.split(chunk), targets.split(chunk), strict=True))


def _sum_over_count(logits, labels, chunk):
    targets = _targets(labels)
    total = sum(cross_entropy(x, t, reduction="sum") for x, t in _pieces(logits, targets, chunk))
    return total / (targets != -100).sum()


def _mean_of_means(logits, labels, chunk):
    means = [cross_entropy(x, t) for x, t in _pieces(logits, _targets(labels), chunk)]
    return torch.stack(means).nanmean()


def _mean_of_means_with_nan(logits, labels, chunk):
    means = [cross_entropy(x, t) for x, t in _pieces(logits, _targets(labels), chunk)]
    return torch.stack(means).mean()


def _divide_by_positions(logits, labels, chunk):
    pieces = _pieces(logits, _targets(labels), chunk)
    return sum(cross_entropy(x, t, reduction="sum") for x, t in pieces) / len(labels)


def _not_shifted(logits, labels, chunk):
    total = sum(cross_entropy(x, t, reduction="sum") for x, t in _pieces(logits, labels, chunk))
    return total / (labels != -100).sum()


def _shifted_twice(logits, labels, chunk):
    return _sum_over_count(logits, _targets(labels), chunk)


def _shifted_after_cutting(logits, labels, chunk):
    pieces = [(x[:-1], t[1:]) for x, t in _pieces(logits, labels, chunk)]
    total = sum(cross_entropy(x, t, reduction="sum") for x, t in pieces)
    return total / sum((t != -100).sum() for _, t in pieces)


def _all_at_once(logits, labels, chunk):
    return cross_entropy(logits[:-1], labels[1:])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (_sum_over_count, None),
        (_mean_of_means, "mean of the chunks' means"),
        (_mean_of_means_with_nan, "means"),
        (lambda logits, labels, chunk: float("nan"), "mean of 0/0"),
        (_divide_by_positions, "divides by all positions"),
        (_not_shifted, "not shifted"),
        (_shifted_twice, "shifted twice"),
        (_shifted_after_cutting, "after cutting"),
        (_all_at_once, "bytes were alive"),
        (lambda logits, labels, chunk: 0.0, "Compare it with the whole"),
    ],
)
def test_chunked_loss_names_the_mistake(answer, said):
    verdict = w.judge("chunked_loss", answer)
    assert verdict.passed == (said is None), verdict.message
    assert said is None or said in verdict.message


def test_the_mean_of_means_passes_with_one_chunk_and_fails_with_more():
    message = w.judge("chunked_loss", _mean_of_means).message
    assert message.startswith("Right with 1 chunk, wrong with 2 chunks")


def _forwards(cell, chunks, labels, state):
    """Right pieces in the wrong order: each state's gradient comes after its chunk is done."""
    count = sum((t != -100).sum() for t in labels)
    total, grads = 0, [torch.zeros_like(state) for _ in range(len(chunks) + 1)]
    for i, (ids, targets) in enumerate(zip(chunks, labels, strict=True)):
        start = state.detach().requires_grad_()
        logits, state = cell(ids, start)
        term = cross_entropy(logits, targets, reduction="sum") / count
        torch.autograd.backward((term, state), (None, grads[i + 1]))
        grads[i] += start.grad
        total += term.detach()
    return total


def _mean_loss(cell, chunks, labels, state):
    total = 0
    for ids, targets in zip(chunks, labels, strict=True):
        logits, state = cell(ids, state)
        if (targets != -100).any():
            total = total + cross_entropy(logits, targets) / len(chunks)
    total.backward()
    return total.detach()


def _mean_of_means_step(cell, chunks, labels, state):
    """The commonest wrong answer: fill, sweep, and each chunk's own mean (the first: NaN)."""
    states = [state]
    with torch.no_grad():
        for ids in chunks[:-1]:
            states.append(cell(ids, states[-1])[1])
    total, grad = 0, torch.zeros_like(state)
    for ids, targets, start in zip(chunks[::-1], labels[::-1], states[::-1], strict=True):
        logits, end = cell(ids, start.requires_grad_())
        term = cross_entropy(logits, targets) / len(chunks)
        torch.autograd.backward((term, end), (None, grad))
        grad, total = start.grad, total + term.detach()
    return total


def _right_loss_and(gradient):
    """The right loss beside gradients that are all, or of one parameter only, `gradient`."""

    def step(cell, chunks, labels, state, names=("embed", "mix", "head")):
        loss = _one_chunk_alive(cell, chunks, labels, state)
        for name in names:
            getattr(cell, name).grad.fill_(gradient)
        return loss

    return step


def _only_the_last_is_nan(*args):
    return _right_loss_and(float("nan"))(*args, names=["head"])


def _nan_loss(*args):
    return _one_chunk_alive(*args) * float("nan")


def _right_loss_mean_gradients(*args):
    _mean_of_means_step(*args)
    return _no_backward(*args)


def _sum_step(*args):
    return _one_chunk_alive(*args) * (torch.cat(args[2]) != -100).sum()


def _no_backward(cell, chunks, labels, state):
    with torch.no_grad():
        return cross_entropy(cell(torch.cat(chunks), state)[0], torch.cat(labels))


def _every_prefix_again(cell, chunks, labels, state):
    """Exact and flat, but it recomputes the whole prefix for every chunk."""
    count = sum((t != -100).sum() for t in labels)
    total, grad = 0, torch.zeros_like(state)
    for i in reversed(range(len(chunks))):
        start = state
        with torch.no_grad():
            for ids in chunks[:i]:
                start = cell(ids, start)[1]
        start = start.clone().requires_grad_()
        logits, end = cell(chunks[i], start)
        term = cross_entropy(logits, labels[i], reduction="sum") / count
        torch.autograd.backward((term, end), (None, grad))
        grad, total = start.grad, total + term.detach()
    return total


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (_one_chunk_alive, None),
        (_detached, "truncated BPTT"),
        (_forwards, "truncated BPTT"),
        (_whole, "one chunk needs"),
        (_mean_loss, "mean of the chunks' means: chunks count different"),
        (_mean_of_means_step, "mean of the chunks' means. The first chunk counts no label"),
        (_nan_loss, "0/0"),
        (_sum_step, "That is the sum"),
        (lambda *args: 0.0, "Add sums over chunks"),
        (_right_loss_and(float("nan")), "gradients hold NaN"),
        (_only_the_last_is_nan, "gradients hold NaN"),
        (_right_loss_mean_gradients, "those of the mean of the chunks' means"),
        (_right_loss_and(float("inf")), "not (largest difference inf)"),
        (_no_backward, "call backward"),
        (_every_prefix_again, "ran 36 times"),
    ],
)
def test_recurrent_step_names_the_mistake(answer, said):
    verdict = w.judge("recurrent_step", answer)
    assert verdict.passed == (said is None), verdict.message
    assert said is None or said in verdict.message


# --- the module itself -------------------------------------------------------------------------


def test_no_warning_about_missing_ipywidgets_reaches_a_reader():
    code = """
import sys, warnings
import oomb_widgets
assert "transformers" not in sys.modules, "imported before the filter is set"
warnings.warn("IProgress not found. Please update jupyter and ipywidgets.")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


# --- pictures --------------------------------------------------------------------------------


def _states(num_chunks=4, pages_per_chunk=2):
    """The states a step of `num_chunks` chunks goes through, without an engine."""
    shape = (1, (num_chunks - 1) * pages_per_chunk)
    slots, terms, states = np.full(shape, -1), np.zeros(shape, int), []

    def snap(phase, chunk):
        table = SimpleNamespace(page_size=4, slots=slots.copy(), terms=terms.copy())
        states.append(
            SimpleNamespace(phase=phase, chunk=chunk, num_chunks=num_chunks, page_table=table)
        )

    for chunk in range(num_chunks - 1):
        at = slice(chunk * pages_per_chunk, (chunk + 1) * pages_per_chunk)
        slots[0, at] = np.arange(at.start, at.stop)
        snap("fill", chunk)
    for chunk in reversed(range(num_chunks)):
        slots[0, chunk * pages_per_chunk :] = -1
        terms[0, chunk * pages_per_chunk :] = 0
        terms[0, : chunk * pages_per_chunk] += 1
        snap("sweep", chunk)
    return states


PICTURES = {
    "who_reads_whom": lambda: w.who_reads_whom(8),
    "who_reads_whom at the turn": lambda: w.who_reads_whom(8, halted=("fill", 6)),
    "one chunk": lambda: w.who_reads_whom(1),
    "gradient_flow": lambda: w.gradient_flow([3, 2, 1, 0]),
    "gradient_flow forwards": lambda: w.gradient_flow([0, 1, 2, 3]),
    "gradient_flow strength": lambda: w.gradient_flow([2, 1, 0], np.ones((3, 3))),
    "alive": lambda: w.alive(
        {"OOMB": {"activations": 2e6, "kv_pages": 1e6}, "whole": {"ordinary": 9e6}}, guess=5e6
    ),
    "memory_growth": lambda: w.memory_growth(
        {"ordinary": [(1024, 1e6), (4096, 4e6)], "activations": [(1024, 1e6), (4096, 1e6)]},
        limit=3e6,
        guess=2048,
    ),
    "memory_growth log": lambda: w.memory_growth({"ordinary": [(1, 1), (2**20, 1e9)]}, log=True),
    "gradient_differences": lambda: w.gradient_differences(
        {"detached": {"Wk": 0.6, "Wq": 0.0}, "sweep": {"Wk": 1e-16, "Wq": 0.0}}, guess=1e-6
    ),
    "page_film": lambda: w.page_film(_states(), chunk_size=8),
    "page_table": lambda: w.page_table(_states()[2]),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_a_png_with_a_sentence(name):
    picture = PICTURES[name]()
    data, metadata = picture._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"}
    assert len(data["text/plain"]) > 40
    assert data["text/plain"].endswith(".")
    image = Image.open(io.BytesIO(data["image/png"])).convert("RGBA")
    assert image.width == 2 * metadata["image/png"]["width"]
    alpha = np.asarray(image)[..., 3]
    assert 0.01 < (alpha > 0).mean() < 0.9, "empty, or an opaque ground that suits one theme only"
    assert len(data["image/png"]) < 60_000


def test_the_readers_guess_is_drawn():
    lines = {"ordinary": [(1024, 1e6), (4096, 4e6)]}
    assert w.memory_growth(lines).png != w.memory_growth(lines, guess=2048).png


def test_text_and_lines_read_on_white_and_on_black():
    """Contrast at least 3 : 1 (what WCAG asks of graphics) against both themes' grounds."""

    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(f * c for f, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    from oomb_widgets.picture import COLOURS

    for name, colour in COLOURS.items():
        if name == "grid":
            continue
        for ground in ("#ffffff", "#111111"):
            pair = sorted((luminance(colour) + 0.05, luminance(ground) + 0.05))
            assert pair[1] / pair[0] >= 2.9, f"{name} {colour} on {ground}: {pair[1] / pair[0]:.2f}"


def test_terms_that_come_too_late_are_counted():
    assert "6 of 6 arrive in time; too late: none" in repr(w.gradient_flow([3, 2, 1, 0]))
    assert "0 of 6 arrive in time" in repr(w.gradient_flow([0, 1, 2, 3]))
    assert "too late: 2 to 1" in repr(w.gradient_flow([3, 1, 2, 0]))


def test_an_order_must_name_each_chunk_once():
    with pytest.raises(ValueError, match=r"each chunk 0\.\.2 once"):
        w.gradient_flow([0, 1, 1])


def test_a_nan_is_drawn_as_wrong_and_named_the_largest():
    picture = w.gradient_differences({"means": {"Wk": 0.5, "Wq": float("nan")}})
    assert "means: largest nan over 2 parameters" in repr(picture)


def test_the_film_says_when_each_chunk_is_complete():
    assert "chunk 2 after sweep 3" in repr(w.page_film(_states(), chunk_size=8))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (140e9, "140 GB")]
)
def test_sizes_are_written_as_people_say_them(value, text):
    assert w.size(value) == text


@pytest.mark.parametrize(("tokens", "text"), [(512, "512"), (16384, "16K"), (2**20, "1M")])
def test_contexts_are_written_as_people_say_them(tokens, text):
    assert w.count(tokens) == text
