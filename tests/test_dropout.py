"""Dropout: the sweep draws the fill's masks, and the gradients are those of these masks."""

import peft
import pytest
import torch
from helpers import chunked_run, gradients, tiny_model, true_fp64, whole_run
from test_exactness import CONFIG, assert_exact

import oomb

CHUNKS = 4
TOKENS = 12 * CHUNKS - 5


class Masks:
    """Takes the place of torch's dropout: draws masks and notes them, or uses given ones."""

    def __init__(self):
        self.drawn = []
        self.given = None

    def __call__(self, x, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return x
        if self.given is not None:
            mask = self.given.pop(0)
        else:
            mask = torch.rand(x.shape, dtype=torch.float64) >= p
            self.drawn.append(mask)
        return x * mask / (1 - p)


def gpt2_with_dropout():
    return tiny_model("gpt2", resid_pdrop=0.2, embd_pdrop=0.3)


def lora_with_dropout():
    adapter = peft.LoraConfig(
        r=4, lora_dropout=0.4, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    model = peft.get_peft_model(tiny_model("qwen2"), adapter).double().train()
    with torch.no_grad():  # LoRA starts with B = 0, which would hide A's gradients
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2)
    return model


@pytest.mark.parametrize("make_model", [gpt2_with_dropout, lora_with_dropout])
def test_gradients_are_those_of_the_recorded_masks(make_model, monkeypatch):
    model, ids, masks = make_model(), torch.randint(0, 97, (2, TOKENS)), Masks()
    monkeypatch.setattr(torch.nn.functional, "dropout", masks)
    with true_fp64():
        config = oomb.EngineConfig(**CONFIG, activation_policy="keep")
        with oomb.Engine(model, config) as engine:
            masks.drawn.clear()  # attaching runs a few tokens
            ours = engine.step(ids).loss.double(), gradients(model)
        calls = len(masks.drawn) // (2 * CHUNKS - 1)  # dropouts in one forward
        assert len(masks.drawn) == calls * (2 * CHUNKS - 1)
        chunks = [masks.drawn[i * calls : (i + 1) * calls] for i in range(2 * CHUNKS - 1)]
        fill_and_last, rest = chunks[:CHUNKS], chunks[CHUNKS:]
        for chunk, again in enumerate(reversed(rest)):  # the sweep goes backwards
            pairs = zip(fill_and_last[chunk], again, strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        masks.given = [torch.cat(call, dim=1) for call in zip(*fill_and_last, strict=True)]
        assert_exact(ours, whole_run(model, ids))
    assert masks.given == []


@pytest.mark.parametrize("make_model", [gpt2_with_dropout, lora_with_dropout])
@pytest.mark.parametrize("policy", ["selective", "layer"])
def test_layers_computed_again_draw_the_same_masks(make_model, policy):
    model, ids = make_model(), torch.randint(0, 97, (2, TOKENS))

    def run(policy):
        torch.manual_seed(5)
        config = {**CONFIG, "activation_policy": policy, "check_replay": True}
        return chunked_run(model, ids, config)

    with true_fp64():
        assert_exact(run(policy), run("keep"), bound=1e-13)


def test_generators_end_where_one_forward_pass_leaves_them():
    """A pass over one chunk is one ordinary forward; over several, `evaluate` is the same walk."""
    model, ids = gpt2_with_dropout(), torch.randint(0, 97, (2, TOKENS))

    def state_after(run):
        torch.manual_seed(5)
        run()
        return torch.get_rng_state()

    for chunk_size in (12, 60):
        config = oomb.EngineConfig(chunk_size=chunk_size, page_size=4)
        with oomb.Engine(model, config) as engine:
            step = state_after(lambda: engine.step(ids))
            assert torch.equal(step, state_after(lambda: engine.evaluate(ids)))
    assert torch.equal(step, state_after(lambda: model(input_ids=ids)))


def test_steps_draw_new_masks():
    model, ids = gpt2_with_dropout(), torch.randint(0, 97, (2, TOKENS))
    with oomb.Engine(model, oomb.EngineConfig(**CONFIG)) as engine:
        engine.step(ids)
        first = gradients(model)
        model.zero_grad()
        engine.step(ids)
    assert any(not torch.equal(first[name], grad) for name, grad in gradients(model).items())


def test_attention_dropout_is_refused_in_training_only():
    model, ids = tiny_model("llama", attention_dropout=0.1), torch.randint(0, 97, (1, 20))
    with oomb.Engine(model, oomb.EngineConfig(**CONFIG)) as engine:
        with pytest.raises(ValueError, match=r"attention dropout must be 0 in training, got 0\.1"):
            engine.step(ids)
        model.eval()
        engine.step(ids)
