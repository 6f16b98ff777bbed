"""The native decoder step against the transformers model whose linears and weights it shares."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import json
import os
import pickle
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
import samples
from lowbit import ops
from lowbit.engines import llama
from lowbit.engines.decode import decode
from lowbit.engines.llama import Decoder, native, refuses
from lowbit.models.replace import replace
from lowbit.nn import QuantLinear, W4A4Linear
from lowbit.types import Activation, FormatError, LowRank

transformers = pytest.importorskip("transformers")
VOCAB = 200
SIZES = dict(
    vocab_size=VOCAB, hidden_size=96, intermediate_size=112, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3 angles, biases": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "one head a key": ("llama", {"num_key_value_heads": 6, "head_dim": 16}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "qwen2 (biases)": ("qwen2", {"num_attention_heads": 4, "head_dim": 16}),
    "qwen3 (q and k norms)": ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 48}),
    "mistral": ("mistral", {"sliding_window": None}),
}


def make(name: str = "llama", scheme: str = "w4a16", seed: int = 0, **changes: Any) -> Any:
    """A random model, every bias and norm random too, its linears quantized (the head not)."""
    family, sizes = MODELS[name]
    torch.manual_seed(seed)
    return samples.random_decoder(family, scheme, **{**SIZES, **sizes, **changes})


def four(activation: str | None = "default", sizes: tuple[int, int] = (128, 192), **parts: Any) -> Any:
    """A random W4A4 model: smoothing that siblings share, Hadamard, a low rank of its own in every linear."""
    model = make("llama", "w4a16", hidden_size=sizes[0], intermediate_size=sizes[1], num_attention_heads=4)
    for key, old in list(model.named_modules()):
        if not isinstance(old, QuantLinear):
            continue
        n, k, r = old.out_features, old.in_features, samples.generator(key)
        sibling = key.rsplit(".", 1)[0] if "mlp.down" not in key and "o_proj" not in key else key
        smooth = (torch.rand(k, generator=samples.generator(sibling)) + 0.5).half()
        rank = parts.get("rank", {}).get(key.rsplit(".", 1)[1], 16)
        low = LowRank(*(torch.randn(size, rank, generator=r).half() / 16 for size in (k, n))) if rank else None
        q = samples.weight(n, k, 64, zeros=False, activation=Activation(4, "group"))
        q = q.with_(scales=(q.scales.float() / 4).half(), smooth=smooth, hadamard=64, low_rank=low)
        replace(model, key, W4A4Linear.from_quantized(parts.get("change", lambda key, q: q)(key, q), activation))
    return model


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def reference(model: Any, ids: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out: Tensor = model(input_ids=ids[None]).logits[0]
    return out


def far(got: Tensor, want: Tensor) -> float:
    """The largest relative difference of a row."""
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100, 300])
def test_prefill_gives_the_logits_of_transformers(name: str, length: int) -> None:
    model = make(name)
    ids = tokens(length)
    got = Decoder.from_model(model, head="float").start(16).feed(ids, keep=length)
    assert got.shape == (length, VOCAB) and far(got, reference(model, ids)) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_tokens_one_by_one_after_a_prompt(name: str) -> None:
    model = make(name)
    ids = tokens(290)
    state = Decoder.from_model(model, head="float").start(16, chunk=64)
    got = [state.feed(ids[:230], keep=3).clone()]  # more than one chunk
    got += [state.feed(ids[at : at + 1]).clone() for at in range(230, 290)]  # over the end of a segment, 256
    assert state.length == 290 and far(torch.cat(got), reference(model, ids)[227:]) < 1e-5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scheme", ["w4a8", "w8a8", "fp16"])
def test_with_int8_activations_and_other_weights(name: str, scheme: str) -> None:
    """A value that lies on the border of two codes may round to either, so the bound is a code's, not float32's."""
    model = make(name, scheme)
    ids = tokens(40)
    decoder = Decoder.from_model(model, head="float")
    assert far(decoder.start().feed(ids, keep=40), reference(model, ids)) < (1e-5 if scheme == "fp16" else 2e-2)


def test_int8_activations_round_as_in_the_modules() -> None:
    """One token, one layer: where every value got the code it gets in QuantLinear, only float32 noise is left."""
    model = make("llama", "w4a8", num_hidden_layers=1)
    got = Decoder.from_model(model, head="float").start().feed(tokens(1))
    assert far(got, reference(model, tokens(1))) < 1e-5  # one code to the other side would be 1e-3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16])
def test_the_same_bits_whatever_the_tier_the_threads_and_the_chunks(name: str, cache_dtype: torch.dtype) -> None:
    decoder = Decoder.from_model(make(name, "w4a8"))
    ids = tokens(280)
    assert bool(torch.isfinite(the_same_bits(decoder, ids, 250, cache_dtype)).all())


def the_same_bits(decoder: Decoder, ids: Tensor, last: int, cache_dtype: torch.dtype = torch.float32) -> Tensor:
    """The logits of all ``ids``; equal for every thread count, tier and chunk, and from ``last`` on one by one."""
    count = len(ids)
    want = decoder.start(cache_dtype=cache_dtype).feed(ids, keep=count)
    before = torch.get_num_threads()
    try:
        for threads, isa, chunk in [(1, "", 33), (3, "", 7), *((2, isa, 50) for isa in ops.cpu_isas())]:
            torch.set_num_threads(threads)
            state = decoder.start(16, cache_dtype, chunk)
            assert torch.equal(state.feed(ids, keep=count, isa=isa), want), (threads, isa, chunk)
            state.length = last
            ones = torch.cat([state.feed(ids[at : at + 1], isa=isa).clone() for at in range(last, count)])
            assert torch.equal(ones, want[last:]), (threads, isa, "one by one")
    finally:
        torch.set_num_threads(before)
    return want


UNEVEN = {"q_proj": 16, "k_proj": 0, "v_proj": 33, "gate_proj": 0, "up_proj": 64, "down_proj": 3}


@pytest.mark.parametrize("rank", [{}, UNEVEN], ids=["one rank", "ranks of their own"])
def test_w4a4_layers_give_the_logits_of_the_modules(rank: dict[str, int]) -> None:
    model = four(None, rank=rank)
    ids = tokens(40)
    assert refuses(model) is None
    assert far(Decoder.from_model(model, head="float").start().feed(ids, keep=40), reference(model, ids)) < 1e-5
    model = four(rank=rank)  # as a checkpoint declares it: 8 bits per token
    assert model.model.layers[0].mlp.up_proj.activation == "token"
    assert far(Decoder.from_model(model, head="float").start().feed(ids, keep=40), reference(model, ids)) < 2e-2


def test_shared_rows_of_w4a4_layers_are_those_of_each_alone() -> None:
    """An identity as activation order changes no bit and keeps k and up from sharing the rows of q and gate."""

    def alone(key: str, q: Any) -> Any:
        return q.with_(perm=torch.arange(q.k).int()) if key.endswith(("k_proj", "up_proj")) else q

    ids = tokens(60)
    want = Decoder.from_model(four(rank=UNEVEN)).start().feed(ids, keep=60)
    assert torch.equal(Decoder.from_model(four(rank=UNEVEN, change=alone)).start().feed(ids, keep=60), want)


@pytest.mark.parametrize("wide", [False, True], ids=["float16 factors", "float32 factors"])
def test_w4a4_steps_have_the_same_bits_whatever_the_tier_the_threads_and_the_chunks(wide: bool) -> None:
    def change(key: str, q: Any) -> Any:
        low = q.low_rank and LowRank(*(t.float() + 1e-5 for t in q.low_rank))
        return q.with_(low_rank=low) if wide and "k_proj" not in key else q  # k: float16 between two of float32

    decoder = Decoder.from_model(four(rank={} if wide else UNEVEN, change=change))
    ids = tokens(90)
    the_same_bits(decoder, ids, 80)


def test_a_w4a4_checkpoint_runs_native_and_on_the_command_line(tmp_path: Any, capsys: Any) -> None:
    from lowbit.cli import main
    from lowbit.models import save

    model = four()
    save.save(model, tmp_path / "m")
    loaded = lowbit.load(tmp_path / "m")
    assert refuses(loaded) is None
    got = decode(loaded, tokens(9), 12, stop=[])
    assert got.engine == "native" and got.tokens == decode(model, tokens(9), 12, stop=[]).tokens
    samples.byte_tokenizer(pad_token="<pad>").save_pretrained(tmp_path / "m")
    assert main(["run", str(tmp_path / "m"), "--prompt", "abc", "--max-new-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] == "native"


def test_a_long_cache_split_over_query_heads_has_the_same_bits() -> None:
    decoder = Decoder.from_model(make("qwen3 (q and k norms)"))
    ids = tokens(700)
    state = decoder.start()
    want = state.feed(ids, keep=1).clone()
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # one key head, two threads: each query head is an item
    try:
        state.length = 699
        assert torch.equal(state.feed(ids[-1:]), want)
    finally:
        torch.set_num_threads(before)


def test_a_float16_cache_is_near() -> None:
    model = make("llama")
    ids = tokens(100)
    state = Decoder.from_model(model, head="float").start(cache_dtype=torch.float16)
    assert 1e-7 < far(state.feed(ids, keep=100), reference(model, ids)) < 5e-3
    assert state.cache_bytes() == 2 * 2 * 2 * 256 * 32 * 2


def test_the_cache_grows_and_goes_back() -> None:
    decoder = Decoder.from_model(make("llama"))
    ids = tokens(90)
    want = decoder.start(512).feed(ids, keep=90)
    state = decoder.start(1)
    assert state.capacity == 16
    got = [state.feed(part, keep=len(part)) for part in ids.split(9)]
    assert state.capacity >= 90 and torch.equal(torch.cat([g.clone() for g in got]), want)
    state.length = 40  # forget the rest; what stands beyond may not show
    assert torch.equal(state.feed(ids[40:60], keep=20), want[40:60])


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    model = make(name)
    ids = tokens(20)
    got = decode(model, ids, 40, stop=[], engine="native", head="float")
    want = decode(model, ids, 40, stop=[], engine="transformers")
    assert got.tokens == want.tokens and len(set(got.tokens)) > 3
    assert (got.engine, got.reason, want.engine, want.reason) == ("native", "", "transformers", "")


def test_the_head_in_8_bits_is_near_the_float_one_and_leaves_the_embedding_alone() -> None:
    model = make("llama", hidden_size=128, num_attention_heads=4)
    before = model.model.embed_tokens.weight.clone()
    ids = tokens(50)
    got = Decoder.from_model(model).start().feed(ids, keep=50)
    assert 1e-5 < far(got, reference(model, ids)) < 2e-2
    assert torch.equal(model.model.embed_tokens.weight, before)
    assert type(model.lm_head) is torch.nn.Linear and model.lm_head.weight is model.model.embed_tokens.weight


def test_a_quantized_head_runs_as_it_is() -> None:
    model = make("untied")
    replace(model, "lm_head", QuantLinear.from_linear(model.lm_head, "w4a16"))
    ids = tokens(30)
    assert far(Decoder.from_model(model).start().feed(ids, keep=30), reference(model, ids)) < 1e-5


def test_linears_that_share_no_rows() -> None:
    """Activation order of its own in k and in up, smoothing in down, other groups in v: each gets rows of its own."""
    model = make("llama", "w4a16")
    for name, changes in (
        ("self_attn.k_proj", {"perm": True}), ("self_attn.v_proj", {"group_size": 32}),
        ("mlp.up_proj", {"perm": True, "smooth": True}), ("mlp.down_proj", {"smooth": True, "bias": True}),
    ):  # fmt: skip
        for index in range(2):
            full = f"model.layers.{index}.{name}"
            old = model.get_submodule(full)
            q = samples.weight(old.out_features, old.in_features, **{"group_size": 16, **changes})
            q = q.with_(scales=(q.scales.float() / 4).half())
            replace(model, full, QuantLinear.from_quantized(q, None))
    ids = tokens(40)
    assert far(Decoder.from_model(model, head="float").start().feed(ids, keep=40), reference(model, ids)) < 1e-5


def test_bfloat16_weights_are_read_as_they_are() -> None:
    model = make("llama").to(torch.bfloat16)
    ids = tokens(30)
    got = Decoder.from_model(model, head="float").start().feed(ids, keep=30)
    wide = make("llama")
    with torch.no_grad():
        for mine, its in zip(wide.parameters(), model.parameters()):
            mine.copy_(its)
    assert far(got, reference(wide, ids)) < 2e-2  # only the head rounds its input and output to bfloat16


# ---- what is refused -------------------------------------------------------------------------------------------------
def spoil(what: str) -> Any:
    if what == "plain linear":
        model = make()
        replace(model, "model.layers.1.mlp.up_proj", torch.nn.Linear(96, 112))
    elif what == "family":
        config = transformers.AutoConfig.for_model("phi", **{**SIZES, "num_key_value_heads": 6})
        model = transformers.AutoModelForCausalLM.from_config(config)
    elif what == "hidden_act":
        model = make(hidden_act="gelu")
    elif what == "rope":
        model = make(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    elif what == "head_dim":
        model = make(head_dim=24)
    elif what == "hook":
        model = make()
        model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    else:
        model = make()
        layer = model.model.layers[0].self_attn.o_proj
        q = layer.to_quantized()
        linear = QuantLinear.from_quantized(q, "token")
        linear.activation_bits = 4
        replace(model, "model.layers.0.self_attn.o_proj", linear)
    return model


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("plain linear", "model.layers.1.mlp.up_proj: found Linear, accepted by the native engine is QuantLinear"),
        ("family", "model: found 'phi' (PhiForCausalLM), accepted by the native engine is a causal LM of llama"),
        ("hidden_act", "hidden_act: found 'gelu'"),
        ("rope", "rope_type: found 'dynamic'"),
        ("head_dim", "head_dim: found 24, accepted by the native engine is a multiple of 16"),
        ("hook", "model.layers.0.mlp: found a forward hook"),
        ("four bits", "model.layers.0.self_attn.o_proj: found activations simulated in 4 bits"),
    ],
)
def test_refusals_give_the_reason_and_transformers_runs(what: str, said: str) -> None:
    model = spoil(what)
    reason = refuses(model)
    assert reason is not None and reason.startswith(said) and "\n" not in reason
    with pytest.raises(FormatError):
        Decoder.from_model(model)
    with pytest.raises(FormatError):
        decode(model, tokens(3), 2, engine="native")
    found = decode(model, tokens(3), 2, stop=[])
    assert (found.engine, found.reason, len(found.tokens)) == ("transformers", reason, 2)


def test_a_sliding_window_limits_the_length() -> None:
    model = make("mistral", sliding_window=24)
    ids = tokens(20)
    decoder = Decoder.from_model(model, head="float")
    state = decoder.start()
    assert decoder.limit == 24 and far(state.feed(ids, keep=20), reference(model, ids)) < 1e-5
    with pytest.raises(FormatError, match="length: found 25, accepted is at most 24"):
        state.feed(tokens(5))
    assert state.length == 20 and decode(model, ids, 4, stop=[]).engine == "native"
    assert "sliding window" in decode(model, ids, 5, stop=[]).reason


def test_wrong_words_and_tokens_are_refused() -> None:
    model = make()
    with pytest.raises(FormatError, match="head: found 'w4'"):
        Decoder.from_model(model, head="w4")
    with pytest.raises(FormatError, match="engine: found 'fast'"):
        decode(model, [1], 1, engine="fast")
    decoder = Decoder.from_model(model)
    with pytest.raises(FormatError, match="cache_dtype: found torch.bfloat16"):
        decoder.start(cache_dtype=torch.bfloat16)
    state = decoder.start()
    for bad in (-1, VOCAB):
        with pytest.raises(RuntimeError, match=f"ids: found {bad} at 1, accepted is 0 .. {VOCAB - 1}"):
            state.feed([5, bad])
    with pytest.raises(FormatError, match="keep: found 3 of 2 tokens"):
        state.feed([5, 6], keep=3)
    with pytest.raises(FormatError, match="of 0 tokens"):
        state.feed([])
    assert state.length == 0
    with pytest.raises(TypeError, match="handle of this process"):
        pickle.dumps(decoder)
    with pytest.raises(TypeError, match="handle of this process"):
        copy.deepcopy(decoder)


def test_the_operator_checks_what_it_is_given() -> None:
    decoder = Decoder.from_model(make())
    state = decoder.start(32)
    row = torch.empty(1, VOCAB)
    good = [decoder.number, torch.tensor([5]), 0, state._keys, state._values, state._cosines, state._sines,
            torch.empty(ops.decoder_scratch(decoder.number, 1), dtype=torch.uint8), row]  # fmt: skip
    torch.library.opcheck(ops.decoder_step, tuple(good), test_utils=("test_schema", "test_faketensor"))
    wrong: list[tuple[int, Any, str]] = [
        (0, 10**9, "which is none or was freed"), (1, torch.tensor([5], dtype=torch.int32), "int64"),
        (2, 32, "the cache holds 32"), (2, -1, "position"), (3, state._keys[:1], "keys"),
        (4, state._values.half(), "keys and values of float32"), (5, state._cosines[:, :4], "rotary"),
        (7, good[7][:64], "scratch"), (8, row.double(), "out"), (8, torch.empty(2, VOCAB), "out"),
    ]  # fmt: skip
    for place, value, said in wrong:
        with pytest.raises(RuntimeError, match=said):
            ops.decoder_step(*good[:place], value, *good[place + 1 :])


def test_a_decoder_outlives_its_model_and_is_freed_with_its_handle() -> None:
    model = make()
    ids = tokens(30)
    want = reference(model, ids)
    decoder = Decoder.from_model(model, head="float")
    del model
    gc.collect()
    make(seed=1)  # somebody else's memory now
    assert far(decoder.start().feed(ids, keep=30), want) < 1e-5
    number = decoder.number
    del decoder
    gc.collect()
    with pytest.raises(RuntimeError, match="which is none or was freed"):
        ops.decoder_scratch(number, 1)


def test_the_decoder_of_a_model_is_made_once_and_again_after_a_change() -> None:
    model = make()
    first = native(model)
    assert native(model) is first and native(model, "float") is not first
    replace(model, "model.layers.0.mlp.up_proj", QuantLinear.from_linear(torch.nn.Linear(96, 112), "w4a16"))
    second = native(model, "float")
    ids = tokens(10)
    assert far(second.start().feed(ids, keep=10), reference(model, ids)) < 1e-5
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    third = native(model, "float")
    assert third is not second and far(third.start().feed(ids, keep=10), reference(model, ids)) < 1e-5
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.activation = "group"
    assert native(model, "float") is not third
    gc.collect()
    assert len(llama._made) <= 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_computes_the_same() -> None:
    decoder = Decoder.from_model(make())
    ids = tokens(40)
    want = decoder.start().feed(ids, keep=40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if torch.equal(decoder.start().feed(ids, keep=40), want) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_callers_at_once_and_after_the_workers_slept() -> None:
    decoder = Decoder.from_model(make())
    ids = tokens(40)
    before = torch.get_num_threads()

    def step(threads: int) -> Tensor:
        torch.set_num_threads(threads)
        return decoder.start().feed(ids, keep=40).clone()

    try:
        want = step(1)
        for threads in (5, 2, 3, 1, 4):  # a team that grew serves fewer again
            time.sleep(0.01)  # longer than a worker spins
            assert all(torch.equal(step(threads), want) for _ in range(5)), threads
        with concurrent.futures.ThreadPoolExecutor(3) as callers:
            assert all(torch.equal(got, want) for got in callers.map(step, [3] * 60))
    finally:
        torch.set_num_threads(before)


def test_a_model_from_disk_runs_native(tmp_path: Any) -> None:
    from lowbit.models import save

    model = make("qwen3 (q and k norms)", "w4a8")
    save.save(model, tmp_path / "m")
    loaded = lowbit.load(tmp_path / "m")
    assert refuses(loaded) is None
    got = decode(loaded, tokens(9), 12, stop=[])
    assert got.engine == "native" and got.tokens == decode(model, tokens(9), 12, stop=[]).tokens


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_a_model_for_decoding_stays_as_stored_where_the_native_step_runs(tmp_path: Any, family: str) -> None:
    from lowbit.engines.decode import load_model
    from lowbit.models import save

    if family == "llama":
        model = make(scheme="w4a8").to(torch.float32)
        model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data.half().float()
    else:
        torch.manual_seed(0)
        sizes = {**SIZES, "head_dim": None, "num_key_value_heads": 6, "tie_word_embeddings": False}
        config = transformers.AutoConfig.for_model(family, **{k: v for k, v in sizes.items() if v is not None})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    save.save(model, tmp_path / "m")
    stored, cast = load_model(tmp_path / "m"), lowbit.load(tmp_path / "m")
    kept = {p.dtype for p in lowbit.load(tmp_path / "m", dtype=None).parameters()}
    assert {p.dtype for p in stored.parameters()} == (kept if family == "llama" else {torch.float32})
    assert stored.model.embed_tokens.weight is stored.lm_head.weight or family != "llama"
    got = decode(stored, tokens(9), 12, stop=[])
    assert got.engine == ("native" if family == "llama" else "transformers")
    assert got.tokens == decode(cast, tokens(9), 12, stop=[]).tokens
