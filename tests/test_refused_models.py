"""Models that chunk recurrence would not compute exactly are refused by name, and left alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from helpers import SIZES, gradients, relative_error, tiny_model, whole_run
from torch import nn
from transformers.models.falcon import modeling_falcon
from untouched import changes, picture

import oomb

CONFIG = oomb.EngineConfig(chunk_size=16, page_size=4, attention_backend="reference")
PLAIN_SIZES = {key: size for key, size in SIZES.items() if key != "num_key_value_heads"}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}


def build(
    family: str, head: str = "ForCausalLM", model: str | None = None, **config: Any
) -> nn.Module:
    """A tiny random model of a family that the other tests do not use."""
    settings = getattr(transformers, f"{family}Config")(**config)
    return getattr(transformers, model or f"{family}{head}")(settings)


def rope(kind: str, **parameters: Any) -> nn.Module:
    parameters = {"rope_type": kind, "rope_theta": 1e4, **parameters}
    return tiny_model("llama", torch.float32, rope_parameters=parameters)


LONGROPE = {
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[Callable[[], nn.Module], type[Exception], list[str]]] = {
    "a torch module": (
        lambda: nn.Linear(2, 2),
        TypeError,
        ["transformers causal language model", "Linear", "AutoModelForCausalLM"],
    ),
    "base model": (
        lambda: tiny_model("llama", torch.float32).model,
        ValueError,
        ["causal language model with a head", "LlamaModel", "AutoModelForCausalLM"],
    ),
    "classifier": (
        lambda: build("Llama", "ForSequenceClassification", **SIZES),
        ValueError,
        ["causal language model with a head", "LlamaForSequenceClassification"],
    ),
    "tagger": (
        lambda: build("Llama", "ForTokenClassification", **SIZES),
        ValueError,
        ["causal language model with a head", "LlamaForTokenClassification"],
    ),
    "encoder-decoder": (
        lambda: build("T5", "ForConditionalGeneration", d_model=32, d_ff=48, num_layers=1),
        ValueError,
        ["causal language model", "T5ForConditionalGeneration"],
    ),
    "masked LM": (
        lambda: build("Bert", "ForMaskedLM", **PLAIN_SIZES),
        ValueError,
        ["BertForMaskedLM", "ForMaskedLMLoss", "ForCausalLMLoss"],
    ),
    "bidirectional LM": (
        lambda: build("Bert", "LMHeadModel", is_decoder=False, **PLAIN_SIZES),
        ValueError,
        ["attention.self", "neither causal nor a sliding window"],
    ),
    "Bamba": (
        lambda: build("Bamba", attn_layer_indices=[1], **MAMBA, **SIZES),
        ValueError,
        ["BambaForCausalLM", "linear_attention", "full_attention and sliding_attention"],
    ),
    "Falcon-H1": (
        lambda: build("FalconH1", mamba_d_ssm=64, head_dim=8, **MAMBA, **SIZES),
        ValueError,
        ["FalconH1ForCausalLM", "hybrid"],
    ),
    "Mamba": (
        lambda: build("Mamba", vocab_size=97, hidden_size=32, num_hidden_layers=1, state_size=4),
        ValueError,
        ["MambaForCausalLM", "linear_attention"],
    ),
    "RWKV": (
        lambda: build("Rwkv", vocab_size=97, hidden_size=32, num_hidden_layers=2),
        ValueError,
        ["RwkvForCausalLM", "state between tokens"],
    ),
    "LFM2": (
        lambda: build("Lfm2", layer_types=["conv", "full_attention"], **SIZES),
        ValueError,
        ["Lfm2ForCausalLM", "conv"],
    ),
    "Qwen3-Next": (
        lambda: build(
            "Qwen3Next",
            head_dim=8,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
            **SIZES,
        ),
        ValueError,
        ["Qwen3NextForCausalLM", "linear_attention"],
    ),
    "dynamic RoPE": (
        lambda: rope("dynamic", factor=2.0),
        ValueError,
        ["LlamaForCausalLM", "RoPE of type 'dynamic'", "length of each call", "yarn"],
    ),
    "longrope": (
        lambda: rope("longrope", **LONGROPE),
        ValueError,
        ["LlamaForCausalLM", "RoPE of type 'longrope'", "length of each call"],
    ),
    "attention softcap": (
        lambda: tiny_model("gemma2", torch.float32, attn_logit_softcapping=50.0),
        ValueError,
        ["model.layers.0.self_attn", "softcap", "not support"],
    ),
    "sinks of another shape": (
        lambda: _with_strange_sinks(used(tiny_model("gpt_oss", torch.float32))),
        ValueError,
        ["model.layers.1.self_attn", "sinks", "[4, 1]", "one per query head, [4]"],
    ),
    "chunked attention": (
        lambda: build(
            "Llama4Text",
            model="Llama4ForCausalLM",
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=2,
            attention_chunk_size=16,
            **SIZES,
        ),
        ValueError,
        ["Llama4ForCausalLM", "chunked_attention", "full_attention and sliding_attention"],
    ),
    "Bloom": (
        lambda: build("Bloom", vocab_size=97, hidden_size=32, n_layer=1, n_head=4),
        ValueError,
        ["BloomForCausalLM", "AttentionInterface"],
    ),
    "MPT": (
        lambda: build("Mpt", vocab_size=97, d_model=32, n_layers=1, n_heads=4, max_seq_len=64),
        ValueError,
        ["MptForCausalLM", "AttentionInterface"],
    ),
    "Falcon": (
        lambda: build("Falcon", alibi=True, **PLAIN_SIZES),
        ValueError,
        # newer transformers runs it through AttentionInterface, with ALiBi's bias as a mask
        ["FalconForCausalLM", "AttentionInterface"]
        if hasattr(modeling_falcon, "FALCON_ATTENTION_CLASSES")
        else ["transformer.h.0.self_attention", "bias of its own", "not support"],
    ),
    "a mask of its own": (  # whose learned part starts at a constant, so that forwards agree
        lambda: build("Doge", **SIZES),
        ValueError,
        ["model.layers.0.self_attn", "of its own", "not support"],
    ),
    "layers left out at random": (
        lambda: build("OPT", ffn_dim=48, layerdrop=0.5, word_embed_proj_dim=32, **PLAIN_SIZES),
        ValueError,
        ["OPTForCausalLM", "layerdrop", "0.5"],
    ),
    "window of no tokens": (
        lambda: tiny_model("mistral", torch.float32, sliding_window=0),
        ValueError,
        ["sliding", "window", "at least 1", "0"],
    ),
    "one layer twice": (
        lambda: _with_shared_layer(tiny_model("qwen2", torch.float32)),
        ValueError,
        ["model.layers.0.self_attn", "more than once per forward"],
    ),
    "on the meta device": (
        lambda: tiny_model("qwen2", torch.float32).to("meta"),
        ValueError,
        ["one device", "meta"],
    ),
    "partly on the meta device": (
        lambda: _with_part_on_meta(tiny_model("qwen2", torch.float32)),
        ValueError,
        ["one device", "cpu, meta"],
    ),
    "router loss without settings": (
        lambda: _without(used(tiny_model("qwen3_moe", torch.float32)), "router_aux_loss_coef"),
        ValueError,
        ["Qwen3MoeForCausalLM", "router_aux_loss_coef", "output_router_logits=False"],
    ),
    "own loss": (
        lambda: _with_own_loss(tiny_model("qwen2", torch.float32)),
        ValueError,
        ["Qwen2ForCausalLM", "own_loss", "ForCausalLMLoss"],
    ),
}


def _with_shared_layer(model: nn.Module) -> nn.Module:
    model.model.layers[1] = model.model.layers[0]
    return model


def _with_strange_sinks(model: nn.Module) -> nn.Module:
    attention = model.model.layers[1].self_attn
    attention.sinks = nn.Parameter(attention.sinks.detach()[:, None])
    return model


def _with_part_on_meta(model: nn.Module) -> nn.Module:
    model.model.layers[1].to("meta")
    return model


def _without(model: nn.Module, attribute: str) -> nn.Module:
    delattr(model, attribute)
    return model


def _with_own_loss(model: nn.Module) -> nn.Module:
    def own_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return logits.sum()

    model.loss_function = own_loss
    return model


def used(model: nn.Module) -> nn.Module:
    """The model after one ordinary run, in which transformers installs hooks for router logits."""
    with torch.no_grad():
        model(input_ids=torch.ones((1, 2), dtype=torch.long))
    return model


def refused(model: Any, error: type[Exception], words: list[str], config: Any = CONFIG) -> None:
    """Attaching raises with these words, in order, and leaves everything as it was."""
    before = picture(model)
    with pytest.raises(error) as caught:
        oomb.Engine(model, config)
    pattern = ".*".join(re.escape(word) for word in words)
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)
    assert changes(before, picture(model)) == []


@pytest.mark.parametrize("name", MODELS)
def test_models_are_refused_by_name(name: str) -> None:
    make, error, words = MODELS[name]
    refused(make().train(), error, words)


def test_mixed_training_flags_survive_a_refusal() -> None:
    model = tiny_model("gemma2", torch.float32, attn_logit_softcapping=50.0)
    model.model.layers[0].eval()
    model.model.layers[1].mlp.eval()
    refused(model, ValueError, ["softcap"])


def test_prompt_learning_is_refused() -> None:
    base = tiny_model("qwen2", torch.float32)
    wrapper = nn.Module()
    wrapper.get_base_model = lambda: base
    wrapper.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}
    refused(wrapper, ValueError, ["LoRA", "prompt learning", "default"])


def test_library_backend_with_a_short_window_is_refused() -> None:
    model = tiny_model("mistral", torch.float32, sliding_window=32)
    config = oomb.EngineConfig(chunk_size=16, page_size=4, attention_backend="library")
    words = ["attention_backend='library'", "sliding window", "'reference' or 'auto'"]
    refused(model, ValueError, words, config)


def test_library_backend_with_a_long_window_is_refused_where_it_matters() -> None:
    model = tiny_model("mistral", torch.float32, sliding_window=150)
    ids = torch.randint(0, 97, (1, 151))
    config = oomb.EngineConfig(chunk_size=32, page_size=4, attention_backend="library")
    with oomb.Engine(model, config) as engine:
        engine.step(ids[:, :150])
        before = picture(model)
        for call in (engine.step, engine.iter_step, engine.evaluate):
            with pytest.raises(ValueError, match=r"'library'.*sliding window.*'reference'"):
                call(ids)
            assert changes(before, picture(model)) == []
        engine.step(ids[:, :150])


# -- what no name tells: the comparison with the whole run ----------------------------------------


def _mean(hidden: torch.Tensor) -> torch.Tensor:
    """Mean of the tokens so far: a state that passes between tokens."""
    count = torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype)
    return hidden.cumsum(1) / count[:, None]


def _previous(hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


def _next(hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(hidden, (0, 0, 0, 1))[:, 1:]


def _length(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * (hidden.shape[1] / 100)


def _place_in_call(hidden: torch.Tensor) -> torch.Tensor:
    place = torch.arange(hidden.shape[1], device=hidden.device, dtype=hidden.dtype)
    return hidden * place[:, None] / 100


LEAKS = [_mean, _previous, _next, _length, _place_in_call]


def leaking_model(
    family: str, dtype: torch.dtype, leak: Callable[[torch.Tensor], torch.Tensor], strength: float
) -> nn.Module:
    """A model whose first layer also adds what depends on other tokens or on the call."""
    model = tiny_model(family, dtype)
    layer = model.get_decoder().layers[0]
    own = type(layer).forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = own(layer, hidden, *args, **kwargs)
        return out + strength * leak(out)

    layer.forward = forward
    return model


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__.strip("_"))
@pytest.mark.parametrize(
    ("dtype", "strength"),
    [(torch.float64, 1e-3), (torch.float32, 1e-2), (torch.bfloat16, 1.0)],
    ids=["fp64", "fp32", "bf16"],
)
def test_hidden_state_between_tokens_is_refused(
    leak: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, strength: float
) -> None:
    model = leaking_model("qwen2", dtype, leak, strength)
    refused(
        model, ValueError, ["Qwen2ForCausalLM", "tokens", "chunk recurrence would not be exact"]
    )


@pytest.mark.parametrize(
    ("leak", "strength"),
    [(_mean, 0.01), (_previous, 0.01), (_next, 0.01), (_length, 0.1), (_place_in_call, 0.1)],
    ids=["mean", "previous", "next", "length", "place_in_call"],
)
def test_small_leaks_are_refused_in_bf16(
    leak: Callable[[torch.Tensor], torch.Tensor], strength: float
) -> None:
    # rounding of whole runs would hide these
    model = leaking_model("qwen2", torch.bfloat16, leak, strength)
    refused(
        model, ValueError, ["Qwen2ForCausalLM", "tokens", "chunk recurrence would not be exact"]
    )


def test_hidden_state_between_tokens_is_refused_among_experts() -> None:
    model = used(leaking_model("qwen3_moe", torch.float32, _mean, 1e-2))
    refused(model, ValueError, ["Qwen3MoeForCausalLM", "would not be exact"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_layer_that_adds_something_of_its_own_token_is_taken(
    family: str, dtype: torch.dtype
) -> None:
    model = used(leaking_model(family, dtype, torch.tanh, 1.0))
    before = picture(model)
    oomb.Engine(model, CONFIG).close()
    assert changes(before, picture(model)) == []


def test_a_model_whose_head_calls_the_decoder_itself_is_taken() -> None:
    model = build("OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0, **PLAIN_SIZES)
    ids = torch.randint(0, 97, (2, 50))
    loss, expected = whole_run(model, ids)
    with oomb.Engine(model, CONFIG) as engine:
        result = engine.step(ids)
    assert relative_error(result.loss.double(), loss) < 1e-5
    # a shift of all keys alike changes nothing, so their bias has no gradient but rounding
    for name, grad in gradients(model).items():
        assert "k_proj.bias" in name or relative_error(grad, expected[name]) < 2e-5, name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_a_padding_token_without_embedding_is_taken(family: str) -> None:
    # transformers starts its row at zero, so that its hidden state may stay zero throughout
    model = tiny_model(family, torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[:20] = 0
    ids = torch.randint(0, 97, (1, 40))
    with oomb.Engine(model, CONFIG) as engine:
        expected = whole_run(model, ids)[0]
        assert relative_error(engine.step(ids).loss.double(), expected) < 1e-5


def test_attaching_draws_no_random_numbers() -> None:
    model = used(tiny_model("gpt2", torch.float32, resid_pdrop=0.1, embd_pdrop=0.1))
    before = picture(model)
    oomb.Engine(model, CONFIG)
    assert changes(before, picture(model)) == []


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_fixed_rope_is_taken(kind: str) -> None:
    parameters = {"factor": 4.0, "original_max_position_embeddings": 128}
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = rope(kind, **parameters)
    ids = torch.randint(0, 97, (1, 200))
    with oomb.Engine(model, CONFIG) as engine:
        expected = model(input_ids=ids, labels=ids).loss.detach()
        assert torch.allclose(engine.evaluate(ids), expected, rtol=1e-5, atol=0)


def test_engines_may_be_made_by_several_threads():
    """transformers' registry of masks is the process's."""
    refused = []

    def attach(model):
        try:
            oomb.Engine(model, oomb.EngineConfig(chunk_size=12, page_size=4)).close()
        except ValueError as error:
            refused.append(error)

    for _ in range(10):
        models = [tiny_model("llama", torch.float32) for _ in range(3)]
        threads = [threading.Thread(target=attach, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert refused == []
