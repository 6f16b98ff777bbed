"""The profile: a synthetic trace with answers worked out by hand, real kernel names, a real run, the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.cli import main
from lowbit.prove import kernel_names, profile, trace
from lowbit.prove.trace import Event
from lowbit.types import FormatError

ROOT = Path(__file__).parents[1]

KERNELS = {
    "GEMM": (
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "nvjet_hsh_128x112_64x8_2x1_v_bz_coopB_TNN",
        "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x3_tn",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_16x16_128x2_tn_align8>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __half, float, true, __half>(cublasSplitKParams<float>)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __half, __half, float, false>(cublasGemvParamsEx)",
        "void at::native::tinygemm_m16n8k16_chunk_kernel<at::native::ALayout_RM<...>>(void const*, int)",
        "triton_tem_fused_mm_t_3",
        "sm80_xmma_fprop_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x64x64",
        "void lowbit::cuda::gemm_sm90<lowbit::cuda::Config<2, 2, 176, 4>>(CUtensorMap, CUtensorMap, lowbit::cuda::GemmArgs)",
        "void lowbit::cuda::gemv<1, 2>(lowbit::cuda::LinearArgs)",
        "void lowbit::cuda::gemm_mma<2, 64>(lowbit::cuda::LinearArgs)",
        "void lowbit::cuda::(anonymous namespace)::gemm_int4<64>(lowbit::cuda::Int4Args)",
    ),
    "attention": (
        "void lowbit::cuda::attention<false>(lowbit::cuda::AttentionArgs)",
        "void lowbit::cuda::(anonymous namespace)::attention_rounded<true>(CUtensorMap, CUtensorMap, CUtensorMap, "
        "lowbit::cuda::AttentionArgs, lowbit::cuda::QuantizeArgs)",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::half_t>>(Flash_fwd_params)",
        "void flash_fwd_splitkv_kernel<...>",
        "fmha_cutlassF_f16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3i_64x128x128_4x1x1_kernel0_0",
        "triton_tem_fused_flex_attention_0",
    ),
    "elementwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>, std::array<char*, 3ul> >(int)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float>>>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(at::TensorIteratorBase&)::{lambda()#1}>(int)",
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, at::native::templates::cuda::normal_and_transform>(long)",
        "triton_poi_fused_add_cat_mul_2",
        "void lowbit::cuda::quantize_rows<2, true>(lowbit::cuda::QuantizeArgs, lowbit::cuda::Shape)",
        "void lowbit::cuda::quantize_short_rows<(lowbit::cuda::Before)1, false, 1, false, true>(lowbit::cuda::QuantizeArgs, lowbit::cuda::ShortShape)",
        "lowbit::cuda::norm_rope(lowbit::cuda::RopeArgs)",
        "void lowbit::cuda::dequantize<4>(lowbit::cuda::DequantizeArgs)",
    ),
    "copy": (
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<OpaqueType<2u>, unsigned int, 4, 64, 64>(OpaqueType<2u>*)",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_kernel_impl>>(long)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(int)",
        "void at::native::elementwise_kernel<128, 4, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>(int)",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8>(int)",
    ),
    "reduce": (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>>>(R)",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*, float const*, int, int, int)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)",
        "triton_per_fused_add_mean_mul_pow_rsqrt_1",
        "triton_red_fused_native_layer_norm_5",
        "lowbit::cuda::inverse_rms(void const*, float*, int, int, float, lowbit::cuda::Dtype)",
    ),
    "other": (
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 1, false>(at::cuda::detail::TensorInfo<float>)",
        "void at_cuda_detail::cub::DeviceRadixSortSingleTileKernel<...>",
        "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "somebody_elses_kernel",
    ),
}  # fmt: skip
OPERATORS = {
    "GEMM": "aten::addmm aten::mm aten::bmm aten::linear aten::_scaled_mm aten::conv1d aten::mkldnn_convolution mkldnn::_linear_pointwise "
    "lowbit::linear lowbit::decoder_step lowbit::cuda_linear",
    "attention": "lowbit::packed_attention lowbit::cuda_attention lowbit::cuda_attention_quantize "
    "aten::scaled_dot_product_attention aten::_scaled_dot_product_flash_attention_for_cpu",
    "copy": "aten::copy_ aten::_to_copy aten::to aten::cat aten::index aten::embedding aten::clone aten::scatter_",
    "reduce": "aten::sum aten::mean aten::_softmax aten::native_layer_norm aten::_fused_rms_norm aten::argmax aten::all",
    "elementwise": "aten::add aten::add_ aten::mul aten::silu aten::rsqrt aten::fill_ aten::masked_fill_ aten::pow aten::__or__ "
    "lowbit::quantize_rows lowbit::add_norm lowbit::silu_mul",
    "other": "aten::view aten::empty aten::transpose aten::topk aten::as_strided",
}


@pytest.mark.parametrize("category", kernel_names.CATEGORIES)
def test_names_of_kernels_and_operators(category: str) -> None:
    wrong = [name for name in KERNELS[category] if kernel_names.of_kernel(name) != category]
    wrong += [name for name in OPERATORS[category].split() if kernel_names.of_operator(name) != category]
    assert wrong == []


def test_every_kernel_of_ours_has_a_category() -> None:
    import re

    names = set()
    for file in (ROOT / "csrc" / "cuda").glob("*.cu*"):
        names |= set(
            re.findall(
                r"__global__[^{;]*?\b(\w+)\(const(?! void)|__global__[^{;]*?\b(\w+)\(const void", file.read_text()
            )
        )
    found = {a or b for a, b in names} - {"__launch_bounds__"}
    assert {"quantize_rows", "norm_rope", "gemv", "gemm_mma"} <= found
    assert [n for n in found if kernel_names.of_kernel(f"void lowbit::cuda::{n}<1>(Args)") == "other"] == []


def gpu(name: str, start: float, duration: float, stream: int, correlation: int) -> Event:
    return Event(name, start, duration, "gpu", f"device 0 stream {stream}", correlation)


def launch(start: float, correlation: int, *stack: str) -> Event:
    return Event("cudaLaunchKernel", start, 2.0, "launch", "1/1", correlation, stack)


#  us      0        10   14      20            30  33        50      60
#  s 7     [ gemm 10 ]   [add 6 ]              |   [mean 17 ]
#  s 8          [ flash 5..14 ]                               [copy 50..60]
#  busy    [ 0 .......... 14 ][ 14 .. 20 ]  gap 13  [33 .......50][..60]
TWO_STREAMS = (
    launch(-20.0, 1), launch(-15.0, 2), launch(-10.0, 3), launch(25.0, 4, "main", "forward", "mean"), launch(30.0, 5),
    gpu("nvjet_hsh_128", 0, 10, 7, 1), gpu("flash_fwd_kernel", 5, 9, 8, 2), gpu("vectorized_elementwise_kernel<add>", 14, 6, 7, 3),
    gpu("reduce_kernel<mean>", 33, 17, 7, 4), gpu("Memcpy DtoD", 50, 10, 8, 5),
)  # fmt: skip


def test_two_streams_by_hand() -> None:
    found = profile.analyse(TWO_STREAMS, steps=2)
    assert found.device == "gpu" and found.events == 5 and found.launches == 5
    assert found.span_ms == pytest.approx(0.060) and found.busy_ms == pytest.approx(0.047)  # 20 + 27
    assert found.idle == pytest.approx(13 / 60) and found.launch_us == 10
    assert {row.category: (row.ms, row.events, row.mean_us) for row in found.rows} == {
        "reduce": (0.017, 1, 17), "GEMM": (0.010, 1, 10), "copy": (0.010, 1, 10), "attention": (0.009, 1, 9),
        "elementwise": (0.006, 1, 6),
    }  # fmt: skip
    assert found.rows[0].category == "reduce" and found.rows[0].share == pytest.approx(17 / 52)
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    (gap,) = found.gaps
    assert (gap.start_us, gap.us, gap.late) == (20, 13, True) and gap.stack == ("main", "forward", "mean")
    assert (gap.before, gap.after) == ("vectorized_elementwise_kernel<add>", "reduce_kernel<mean>")
    assert found.late_us == 13 and (found.gap_count, found.boundaries) == (1, 0)
    each = found.per_step()
    assert each["launches"] == 2.5 and each["span_ms"] == pytest.approx(0.03) and each["launch_us"] == 5


def test_a_kernel_inside_another_leaves_no_gap() -> None:
    events = [gpu("a", 0, 100, 7, 1), gpu("b", 10, 20, 8, 2), gpu("c", 40, 10, 8, 3), gpu("d", 100, 5, 8, 4)]
    found = profile.analyse(events)
    assert found.gaps == [] and found.busy_ms == pytest.approx(found.span_ms) == pytest.approx(0.105)
    assert found.launches is None and found.rows[0].ms == pytest.approx(0.135)  # sums over streams pass the span


def test_gaps_are_sorted_counted_and_told_apart() -> None:
    starts = [0.0, 13.0, 25.0, 60.0, 72.5]  # 10 us each: gaps of 3, 2, 25, 2.5
    events = [gpu("k", start, 10, 7, i) for i, start in enumerate(starts)]
    events += [launch(-5.0, 0), launch(-4.0, 1), launch(-3.0, 2), launch(40.0, 3), launch(41.0, 4)]
    found = profile.analyse(events, gaps=2)
    assert [gap.us for gap in found.gaps] == [25, 3] and found.gap_count == 4
    assert found.boundaries == 3 and found.boundary_us == pytest.approx(7.5)
    assert found.late_us == 25 and found.gaps[0].late is True and found.gaps[1].late is False
    graph = profile.analyse([*(gpu("k", start, 10, 7, 9) for start in starts), launch(-5.0, 9)])
    assert graph.launches == 1 and graph.late_us == 0 and graph.events == 5


def test_own_time_of_operators_on_the_cpu_by_hand() -> None:
    def op(name: str, start: float, duration: float, lane: str = "1/1") -> Event:
        return Event(name, start, duration, "op", lane)

    events = [
        Event("run.py(1): main", 0, 100, "python", "1/1"),
        op("aten::linear", 0, 30), op("aten::t", 2, 4), op("aten::addmm", 8, 20), op("aten::copy_", 10, 3),
        Event("run.py(9): slow", 31, 40, "python", "1/1"), op("aten::add", 70, 10), op("aten::mul", 75, 20, "1/2"),
    ]  # fmt: skip
    found = profile.analyse(trace.with_stacks(events))
    assert found.device == "cpu" and found.launches is None
    times = {row.category: (pytest.approx(row.ms * 1e3), row.events) for row in found.rows}
    # linear 30 - 4 - 20 = 6 and addmm 20 - 3 = 17; add 10 and mul 20; t 4; copy 3
    assert times == {"GEMM": (23, 2), "elementwise": (30, 2), "other": (4, 1), "copy": (3, 1)}
    assert found.span_ms == pytest.approx(0.095) and found.busy_ms == pytest.approx(0.055)
    (gap,) = found.gaps
    assert (gap.start_us, gap.us, gap.after) == (30, 40, "aten::add")
    assert gap.stack == ("run.py(1): main", "run.py(9): slow") and gap.late is None


def test_stacks_come_from_what_is_around_on_the_same_thread() -> None:
    events = [
        Event("outer", 0, 50, "python", "1/1"), Event("inner", 5, 10, "python", "1/1"),
        Event("cudaLaunchKernel", 6, 1, "launch", "1/1", 1), Event("cudaLaunchKernel", 20, 1, "launch", "1/1", 2),
        Event("cudaLaunchKernel", 7, 1, "launch", "1/2", 3),
    ]  # fmt: skip
    stacks = {e.correlation: e.stack for e in trace.with_stacks(events) if e.kind == "launch"}
    assert stacks == {1: ("outer", "inner"), 2: ("outer",), 3: ()}
    assert (
        profile.cause(("a", "<built-in function x>", "torch/nn/modules/module.py(1): f", "b", "c", "d")) == "b > c > d"
    )


def written(path: Path, items: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": items}))
    return path


def test_a_trace_file_is_read(tmp_path: Path) -> None:
    def item(cat: str, name: str, ts: float, dur: float, **args: object) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 2, "args": args}

    items = [
        {"ph": "M", "name": "process_name", "args": {}},
        item("python_function", "f.py(3): f", 1000.0, 50.0),
        item("user_annotation", "lowbit call 0, 3 steps", 1000.0, 60.0),
        item("user_annotation", "ProfilerStep#4", 1000.0, 60.0),
        item("gpu_user_annotation", "lowbit call 0, 3 steps", 1000.0, 60.0),
        item("cuda_runtime", "cudaLaunchKernel", 1001.0, 4.0, correlation=5),
        item("cuda_runtime", "cudaDeviceSynchronize", 1006.0, 4.0, correlation=6),
        item("cuda_driver", "cuLaunchKernelEx", 1041.0, 4.0, correlation=7),
        item("kernel", "gemm", 1010.0, 5.0, correlation=5, stream=7, device=0),
        item("gpu_memcpy", "Memcpy DtoH", 1045.5, 2.0, correlation=7, stream=7, device=0),
    ]
    plain = written(tmp_path / "a.json", items)
    events = trace.read(plain)
    assert [e.kind for e in events] == ["python", "mark", "mark", "launch", "gpu", "launch", "gpu"]
    assert events[0].start == 0 and trace.steps_of(events) == 4
    found = profile.of_file(plain)
    assert found.steps == 4 and found.launches == 2 and found.launch_us == 8
    assert found.gaps[0].us == pytest.approx(30.5) and found.gaps[0].stack == (
        "lowbit call 0, 3 steps",
        "ProfilerStep#4",
        "f.py(3): f",
    )
    assert profile.of_file(plain, 2).steps == 2
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert profile.of_file(packed)._replace(trace=None) == found._replace(trace=None)
    for text, words in (
        ("{", "JSONDecodeError"),
        ("{}", "KeyError"),
        ('{"traceEvents": []}', "no kernel and no operator"),
    ):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(FormatError, match=words):
            trace.read(tmp_path / "b.json")
    with pytest.raises(FormatError, match="No such file"):
        trace.read(tmp_path / "c.json")
    with pytest.raises(FormatError, match="no kernel and no operator"):
        profile.of_file(written(tmp_path / "d.json", items[1:2]))


def test_a_run_of_this_machine(tmp_path: Path) -> None:
    layer = torch.nn.Linear(64, 64)
    x, calls = torch.randn(32, 64), []

    def call() -> None:
        calls.append(1)
        with torch.inference_mode():
            y = torch.nn.functional.silu(layer(x))
            torch.cat([y, y]).sum(-1)

    file = tmp_path / "out" / "trace.json"
    found = profile.profile(call, 3, per_call=2, path=file)
    assert len(calls) == 1 + 1 + 3 and found.steps == 6 and found.wall_ms is not None and found.wall_ms > 0
    if found.device == "cpu":
        counts = {row.category: row.events for row in found.rows}
        assert counts["reduce"] == 3 and min(counts["GEMM"], counts["copy"], counts["elementwise"]) >= 3
        assert any("test_profile.py" in frame for gap in found.gaps for frame in gap.stack)
        sums = sum(row.ms for row in found.rows)
        assert 0 <= found.idle < 1 and sums <= found.span_ms * 1.001 and sums == pytest.approx(found.busy_ms, rel=1e-3)
    again = profile.of_file(file)
    assert again.steps == 6 and again.rows == found.rows and json.loads(json.dumps(found.as_dict()))["steps"] == 6
    bare = profile.profile(call, 1, stacks=False)
    assert bare.trace is None and not any(".py(" in frame for gap in bare.gaps for frame in gap.stack)
    with pytest.raises(FormatError, match="found 0 steps"):
        profile.profile(call, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_the_command_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.json.gz"
    line = ["profile", str(model), "--tokens", "3", "--engine", "transformers"]
    assert main([*line, "--trace", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["steps"] == 3 and found["what"] == "3 tokens after 32, engine transformers" and file.is_file()
    assert {row["category"] for row in found["rows"]} >= {"GEMM", "elementwise", "copy", "attention"}
    assert 0 < len(found["gaps"]) <= 10 and found["per_step"]["events"] == found["events"] / 3
    assert main(["profile", str(file)]) == 0
    text = capsys.readouterr().out
    assert "3 steps" in text and "GEMM" in text and "CPU was in" in text
    assert main([*line[:2], "--tokens", "2", "--no-stacks"]) == 0
    for arguments, words in (
        (("profile",), "accepted is one of a model directory, a trace file, --omnivoice DIR and --random SIZE"),
        (("profile", model, "--omnivoice", model), "accepted is one of"),
        (("profile", model, "--audio", "2"), "--audio: found 2.0, accepted with --omnivoice"),
        (("profile", "--omnivoice", model, "--tokens", "2"), "--tokens: found 2, accepted without --omnivoice"),
        (("profile", model, "--tokens", "0"), "--tokens: found 0"),
        (("profile", model, "--trace", "x.txt"), "accepted is a name that ends in .json or .json.gz"),
        (("profile", tmp_path / "no.json"), "No such file"),
    ):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert not out and words in err and len(err.splitlines()) == 1, arguments


def test_omnivoice_runs_its_own_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam alone, on a stand-in for the package; the real class needs a checkpoint."""
    import sys
    import types

    from lowbit.prove import profile_runs

    seen: dict[str, Any] = {}

    class OmniVoice:
        @classmethod
        def from_pretrained(cls, path: str, **more: Any) -> OmniVoice:
            seen["path"] = path
            return cls()

        def _generate_iterative(self, task: str) -> str:
            return task

        def create_voice_clone_prompt(self, audio: tuple[torch.Tensor, int], ref_text: str) -> str:
            seen["audio"] = audio
            return "prompt"

        def generate(self, **more: Any) -> None:
            seen["generate"] = more
            seen["decoded"] = self._generate_iterative("task")

    module = types.ModuleType("omnivoice")
    module.OmniVoice = OmniVoice  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "omnivoice", module)
    run = profile_runs.omnivoice("dir", audio=1.5, steps=4, prepare=lambda model: seen.update(prepared=model))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        run.call()
    assert seen["decoded"] == "task" and trace.GENERATION in {event.name for event in recorded.events() or ()}
    assert run.steps == 4 and seen["path"] == "dir" and isinstance(seen["prepared"], OmniVoice)
    wave, rate = seen["audio"]
    assert rate == 24000 and wave.shape == (1, 72000) and 0.01 < float(wave.abs().max()) < 1
    assert seen["generate"]["num_step"] == 4 and seen["generate"]["duration"] == 1.5
    monkeypatch.setitem(sys.modules, "omnivoice", None)
    with pytest.raises(FormatError, match="found no package omnivoice"):
        profile_runs.omnivoice("dir")
