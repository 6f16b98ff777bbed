"""The command line on a tiny model with a byte tokenizer: every command, its JSON, its errors, its exit codes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
import samples
from lowbit.checkpoint import open_checkpoint
from lowbit.cli import main
from lowbit.cli.show import table
from lowbit.models import api, save
from lowbit.prove.compare import perplexity
from lowbit.types import one_line

transformers = pytest.importorskip("transformers")
TEXT = "The quick brown fox jumps over the lazy dog; it was not amused. " * 40
COMMANDS = ("quantize", "convert", "inspect", "run", "eval", "explain", "profile", "roofline", "speak", "bench")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of 259 tokens: three special ones and every byte."""
    path = tmp_path_factory.mktemp("plain")
    fast = samples.byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = "{% for turn in messages %}<s>{{ turn.content }}\n{% endfor %}"
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "text.txt").write_text(TEXT, "utf-8")
    return path


@pytest.fixture(scope="module")
def quantized(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, quantized by the command line."""
    out = tmp_path_factory.mktemp("quantized") / "model"
    assert main(["quantize", str(plain), str(out), "--method", "rtn", "--group", "32", "--symmetric", "--json"]) == 0
    return out


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """A command with --json: exit code 0 and one document on stdout."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    found: dict[str, Any] = json.loads(lines[0])
    return found


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """A command that is refused: exit code 2, nothing on stdout, one line on stderr."""
    capsys.readouterr()
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:  # argparse
        code = int(str(stop.code))
    out, err = capsys.readouterr()
    assert code == 2 and not out and len(err.splitlines()) == 1 and "Traceback" not in err
    return err


def test_quantize_rtn_writes_a_model_that_loads_with_its_tokenizer(plain: Path, quantized: Path) -> None:
    model = lowbit.load(quantized)
    want = lowbit.load(plain)
    api.quantize(want, "w4a8", "rtn", group_size=32, symmetric=True, progress=False)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, want(ids).logits)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        assert (quantized / name).is_file()
    assert transformers.AutoTokenizer.from_pretrained(quantized)("fox")["input_ids"]
    assert not quantized.with_name("model.partial").exists()
    assert not [file.name for file in quantized.iterdir() if file.name.endswith((".tmp", ".bin"))]


def test_quantize_gptq_from_a_text_file(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["quantize", plain, out, "--calibration", plain / "text.txt", "--group", "32", "--tokens", "512"]
    found = run(capsys, *arguments, "--activation", "token", "--skip", "down_proj", "--dense-dtype", "bfloat16")
    assert len(found["rows"]) == 12 and {row["method"][:4] for row in found["rows"]} <= {"gptq", "rtn", "rtn+"}
    assert not any(row["name"].endswith(("lm_head", "down_proj")) for row in found["rows"])
    assert any(row["method"].startswith("gptq") for row in found["rows"]) and found["calibration_tokens"] == 512
    assert found["file_bytes"] == (out / "model.safetensors").stat().st_size
    checkpoint = open_checkpoint(out)
    assert checkpoint.dtype("model.embed_tokens.weight") == torch.bfloat16
    layers = [module for module in lowbit.load(out).modules() if isinstance(module, lowbit.QuantLinear)]
    assert len(layers) == 12 and {layer.activation for layer in layers} == {"token"}
    assert not out.with_name("out.partial").exists()


def test_quantize_takes_the_head_on_request(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "quantize", plain, tmp_path / "out", "--method", "rtn", "--scheme", "w8a8", "--head")
    assert len(found["rows"]) == 15 and found["rows"][-1]["name"] == "lm_head"
    assert isinstance(lowbit.load(tmp_path / "out").lm_head, lowbit.QuantLinear)


def test_quantize_prints_a_row_for_every_layer(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(plain), str(tmp_path / "out"), "--scheme", "fp16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["layer", "method"] and len(lines) == 1 + 14 + 1
    assert sum("fp16" in line for line in lines) == 14 and "14 linears" in lines[-1]


def test_eval_prints_the_perplexity_of_plain_and_quantized(
    plain: Path, quantized: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--text", plain / "text.txt", "--tokens", 512, "--context", 64, "--skip", 5]
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    for path in (plain, quantized):
        found = run(capsys, "eval", path, *common)
        ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"][5:517]
        want = perplexity(lowbit.load(path), ids, context=64)
        assert found["perplexity"] == want.perplexity and found["scored"] == 8 * 63
    both = run(capsys, "eval", plain, quantized, *common)["models"]
    assert [row["model"] for row in both] == [str(plain), str(quantized)]
    assert (
        both[1]["bytes"] < both[0]["bytes"] and 0 < abs(math.log(both[1]["perplexity"] / both[0]["perplexity"])) < 0.5
    )
    assert main(["eval", str(plain), *map(str, common)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and f"{both[0]['perplexity']:.4f}" in lines[1]


def test_inspect_says_what_is_in_a_checkpoint(plain: Path, quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "inspect", quantized)
    assert found["format"] == "lowbit" and len(found["layers"]) == 14
    row = next(row for row in found["layers"] if row["name"] == "model.layers.1.mlp.down_proj")
    assert (row["bits"], row["group"], row["symmetric"], row["act_order"], row["n"], row["k"]) == (
        4,
        32,
        True,
        False,
        64,
        128,
    )
    assert row["bytes"] == 64 * 64 + 64 * 4 * 2 and row["activation"] == "8 group"
    total = sum(layer["bytes"] for layer in found["layers"]) + found["dense_bytes"]
    checkpoint = open_checkpoint(quantized)
    assert total == found["total_bytes"] == sum(checkpoint.nbytes(name) for name in checkpoint)
    assert run(capsys, "inspect", plain)["format"] == "plain"
    assert main(["inspect", str(quantized)]) == 0
    assert "model.layers.1.mlp.down_proj" in capsys.readouterr().out


def test_inspect_shows_act_order_and_oddities_of_a_foreign_file(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(capsys, "inspect", shared / "fixtures" / "gptqmodel-gptq-w4g64-sym-descact-1l")
    assert found["format"] == "gptq" and all(row["act_order"] and row["group"] == 64 for row in found["layers"])
    mixed = run(capsys, "inspect", shared / "fixtures" / "gptqmodel-gptq-dynamic-1l")
    assert {(row["bits"], row["group"]) for row in mixed["layers"]} == {(8, 32), (4, 64)}


@pytest.mark.parametrize("target", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
def test_convert_there_and_back(target: str, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    symmetric = [] if target == "awq" else ["--symmetric"]
    run(capsys, "quantize", plain, source, "--method", "rtn", "--group", "32", *symmetric)
    found = run(capsys, "convert", source, tmp_path / "there", "--to", target)
    assert (found["source"], found["target"], found["layers"]) == ("lowbit", target, 14)
    assert run(capsys, "inspect", tmp_path / "there")["format"] == target
    run(capsys, "convert", tmp_path / "there", tmp_path / "back", "--to", "lowbit")
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        logits = [lowbit.load(path)(ids).logits for path in (source, tmp_path / "there", tmp_path / "back")]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_convert_of_a_foreign_file_keeps_its_weights(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shared / "fixtures" / "gptqmodel-gptq-w4g64-sym-descact-1l"
    run(capsys, "convert", source, tmp_path / "out", "--to", "lowbit")
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(lowbit.load(source)(ids).logits, lowbit.load(tmp_path / "out")(ids).logits)


def test_convert_refuses_what_the_target_cannot_hold_and_writes_nothing(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = lowbit.load(plain)
    api.quantize(model, "w4a8", "rtn", group_size=32, progress=False)
    name = "model.layers.0.mlp.up_proj"
    q = model.get_submodule(name).to_quantized().with_(smooth=torch.full((64,), 2.0))
    lowbit.models.replace.replace(model, name, lowbit.QuantLinear.from_quantized(q))
    save.save(model, tmp_path / "in")
    said = fails(capsys, "convert", tmp_path / "in", tmp_path / "out", "--to", "gptq")
    assert name in said and "smooth" in said and not (tmp_path / "out").exists()
    assert "plain weights" in fails(capsys, "convert", plain, tmp_path / "out", "--to", "gptq")
    assert "the input itself" in fails(capsys, "convert", tmp_path / "in", tmp_path / "in", "--to", "lowbit")


def test_run_generates_text(quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", quantized, "--prompt", "The fox", "--max-new-tokens", 8]
    found = run(capsys, *arguments)
    assert 1 <= len(found["tokens"]) <= 8 and found["prompt_tokens"] == 7
    assert found["prefill_tokens_per_s"] > 0
    assert main([str(word) for word in arguments]) == 0
    out, err = capsys.readouterr()
    assert out == "The fox" + found["text"] + "\n" and "tokens/s" in err and "engine native\n" in err
    assert (found["engine"], found["reason"]) == ("native", "")
    plainly = run(capsys, *arguments, "--engine", "transformers")
    assert plainly["engine"] == "transformers" and plainly["prompt_tokens"] == 7
    assert run(capsys, *arguments, "--head", "float")["engine"] == "native"
    sampled = [run(capsys, *arguments, "--temperature", 3, "--seed", seed)["tokens"] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert run(capsys, *arguments, "--chat")["prompt_tokens"] != 7


def test_explain_prints_kernels(quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "explain", quantized)
    assert len(found["layers"]) == 14 and all(row["kernel"] for row in found["layers"])
    assert main(["explain", str(quantized)]) == 0
    assert found["layers"][0]["kernel"] in capsys.readouterr().out


def test_bench_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    layers = pytest.importorskip("lowbit.bench.layers")
    heard: list[list[str]] = []
    monkeypatch.setattr(layers, "main", lambda argv: heard.append(list(argv)))
    assert main(["bench", "layers", "--shape", "64x64", "--json"]) == 0
    assert heard == [["--shape", "64x64", "--json"]]
    assert "bench: found 'nothing', accepted are layers, peers, models, rtf, numbers" in fails(
        capsys, "bench", "nothing"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "nowhere"], "nowhere"),
        (["eval", "nowhere", "--text", "{plain}/text.txt"], "nowhere: found no such directory"),
        (["eval", "{plain}", "--text", "{plain}/none.txt"], "none.txt: found No such file"),
        (["eval", "{plain}", "--text", "{plain}/model.safetensors"], "not UTF-8"),
        (["eval", "{plain}", "--text", "{plain}/text.txt", "--context", "1"], "context 1"),
        (["run", "{plain}", "--prompt", ""], "prompt: found 0 tokens"),
        (["quantize", "{plain}", "{plain}", "--method", "rtn"], "the input itself"),
        (["quantize", "{plain}", "out", "--method", "gptq"], "--calibration: found nothing"),
        (["quantize", "{plain}", "{tmp}/out", "--method", "rtn", "--group", "48"], "group_size: found 48"),
        (["quantize", "{plain}", "{tmp}/out", "--scheme", "w5"], "w5"),
        (["convert", "{plain}", "{tmp}/out", "--to", "gguf"], "gguf"),
        (["dance"], "dance"),
        ([], "COMMAND"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    arguments: list[str], said: str, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in fails(capsys, *(word.format(plain=plain, tmp=tmp_path) for word in arguments))
    assert not (tmp_path / "out").exists()


def test_a_pickle_is_refused_with_the_command_that_converts_it(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04never opened")
    said = fails(capsys, "explain", tmp_path)
    assert "pytorch_model.bin" in said and "safetensors" in said


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(lowbit.FormatError):
        main(["inspect", "nowhere", "--debug"])


def test_unexpected_errors_name_their_type() -> None:
    assert one_line(RuntimeError("two\nlines")) == "RuntimeError: two lines"
    assert one_line(lowbit.FormatError("a: b")) == "a: b"


def test_stopping_says_how_to_go_on(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lowbit.models.directory.quantize_directory", stop)
    out = tmp_path / "out"
    assert main(["quantize", str(plain), str(out), "--calibration", str(plain / "text.txt")]) == 130
    said = capsys.readouterr().err
    assert f"{out}.partial" in said and "the same command resumes" in said and not out.exists()


def test_a_stopped_run_resumes_to_the_same_bytes(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lowbit.models import calibrate

    def arguments(out: Path) -> list[str]:
        words = [
            "quantize",
            plain,
            out,
            "--calibration",
            plain / "text.txt",
            "--group",
            "32",
            "--tokens",
            "512",
            "--json",
        ]
        return [str(word) for word in words]

    assert main(arguments(tmp_path / "straight")) == 0
    original, calls = calibrate.quantize_linears, [0]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 6:  # in the second block
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    for module in [calibrate, *(m for n, m in sys.modules.items() if n.startswith("lowbit.models."))]:
        if getattr(module, "quantize_linears", None) is original:
            monkeypatch.setattr(module, "quantize_linears", interrupted)
    out = tmp_path / "out"
    try:
        assert main(arguments(out)) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert not out.exists() and (tmp_path / "out.partial").is_dir() and calls[0] == 6
    assert main(arguments(out)) == 0
    assert calls[0] == 6 + 4  # only the second block was done again
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "straight/model.safetensors").read_bytes()
    assert not (tmp_path / "out.partial").exists()


def test_as_a_process_without_a_traceback(tmp_path: Path) -> None:
    source = str(Path(lowbit.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "lowbit"]
    done = subprocess.run([*command, "inspect", str(tmp_path)], capture_output=True, text=True, env=env)
    assert done.returncode == 2 and not done.stdout and len(done.stderr.splitlines()) == 1, done.stderr
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, env=env)
    assert shown.returncode == 0 and all(name in shown.stdout for name in COMMANDS)


def test_tables_are_aligned_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    table("title", ["name", "n"], [["a", 5], ["long", 1234]])
    assert capsys.readouterr().out.splitlines() == ["title", "name     n", "a        5", "long  1234"]
    table("", ["name"], [])
    assert capsys.readouterr().out.splitlines() == ["name"]
