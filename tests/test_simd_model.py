"""The tiers of CPUs that this machine may not be: built over a model of their instructions and held to scalar's bytes.

simd_model/model.h says what AVX-VNNI and AVX-512 do, in AVX2, and simd_model/tiles.h what the tiles of AMX do;
simd_model/compare.cpp runs every kernel table on random and extreme inputs. The same program, linked with the plain
objects, checks the real instructions of this CPU. No emulator executes tiles, so their encodings are read as well.
"""

from __future__ import annotations

import itertools
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "simd_model"
CPU = Path(__file__).parents[1] / "csrc" / "cpu"
COMPILER = shutil.which("g++")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
MODEL = [*AVX2, "-include", str(HERE / "model.h")]
WIDE = [*MODEL, "-DLOWBIT_MODEL_AVX512"]
TIERS = {
    "avx2": AVX2,
    "avxvnni": MODEL,
    "avx512vnni": [*WIDE, "-O0"],
    "amx": [*WIDE, "-include", str(HERE / "tiles.h"), "-O0"],
}


def cpu_flags() -> set[str]:
    try:
        line = next(v for v in Path("/proc/cpuinfo").read_text().splitlines() if v.startswith("flags"))
    except (OSError, StopIteration):
        return set()
    return set(line.split())


pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no g++"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the model is written in AVX2"),
    pytest.mark.skipif(not {"avx2", "fma", "f16c"} <= cpu_flags(), reason="this CPU lacks AVX2, FMA or F16C"),
]


def compile_(source: Path, target: Path, *flags: str) -> Path:
    command = [
        str(COMPILER),
        "-std=c++20",
        "-O1",
        "-ffp-contract=off",
        f"-I{CPU}",
        *flags,
        "-c",
        str(source),
        "-o",
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def link(objects: list[Path], target: Path) -> Path:
    done = subprocess.run(
        [str(COMPILER), *map(str, objects), "-o", str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simd")


@pytest.fixture(scope="module")
def common(folder: Path) -> list[Path]:
    sources = [HERE / "compare.cpp", CPU / "dispatch.cpp", CPU / "isa" / "scalar.cpp"]
    return [compile_(s, folder / f"{s.stem}.o") for s in sources]


@pytest.fixture(scope="module")
def program(folder: Path, common: list[Path]) -> Path:
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(compile_, CPU / "isa" / f"{t}.cpp", folder / f"{t}.o", *flags) for t, flags in TIERS.items()
        ]
        return link([*common, *(j.result() for j in jobs)], folder / "compare")


@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_gives_the_bytes_of_scalar(program: Path, tier: str) -> None:
    done = subprocess.run([str(program), "--all", tier], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    found = re.search(rf"^{tier}: (\d+) outputs compared with scalar, 0 differ$", done.stdout, re.M)
    assert found and int(found[1]) > 2000, done.stdout


# One wrong detail at a time, put in by the preprocessor: the comparison, or the model itself, must notice it.
BREAKS = {
    "vpdpbusd saturates": ("avx512vnni", "SATURATE", "avx512vnni differs"),
    "products and sums rounded apart": ("avx512vnni", "FMA", "avx512vnni differs"),
    "toward zero": ("avx512vnni", "ROUND", "avx512vnni differs"),
    "NaN payload kept": ("avx512vnni", "NAN", "avx512vnni differs"),
    "tiles of w of the other sign": ("amx", "SIGN", "amx differs"),
    "x and w change places": ("amx", "OPERANDS", "tiles: a product into a tile of another size"),
    "tiles are not released": ("amx", "RELEASE", "tiles: the program ended without tilerelease"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_tier_is_noticed(folder: Path, common: list[Path], program: Path, what: str) -> None:
    tier, flag, said = BREAKS[what]
    broken = compile_(CPU / "isa" / f"{tier}.cpp", folder / f"{flag}.o", *TIERS[tier], f"-DLOWBIT_BREAK_{flag}")
    whole = [folder / f"{t}.o" for t in TIERS if t != tier]
    command = [str(link([*common, *whole, broken], folder / flag)), "--all", tier, "stop"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and said in done.stdout, done.stdout


# ---- encodings ---------------------------------------------------------------------------------------------------------
def flags_of(tier: str) -> list[str]:
    """What CMakeLists.txt compiles a tier with."""
    text = re.sub(r"#.*", "", (CPU.parents[1] / "CMakeLists.txt").read_text())
    found = re.search(rf"set\(isa_{tier}\b([^)]*)\)", text)
    assert found, tier
    return [f for w in found[1].split() for f in (flags_of(w[6:-1]) if w.startswith("${isa_") else [w.strip('"')]) if f]


@pytest.fixture(scope="module")
def listing(folder: Path) -> Callable[[str], str]:
    """tier -> its object with the instruction sets it has in the package, disassembled."""
    if not shutil.which("objdump"):
        pytest.skip("no objdump")
    made: dict[str, str] = {}

    def get(tier: str) -> str:
        if tier not in made:
            file = compile_(CPU / "isa" / f"{tier}.cpp", folder / f"{tier}.plain.o", *flags_of(tier))
            done = subprocess.run(["objdump", "-d", "-w", str(file)], capture_output=True, text=True, check=True)
            made[tier] = done.stdout
        return made[tier]

    return get


def tile_instructions(text: str) -> set[tuple[str, str]]:
    """(name, bytes in hex) of each line "address: bytes  name operands" whose name is one of a tile's."""
    lines = re.findall(r"^\s*[0-9a-f]+:\t((?:[0-9a-f]{2} )+)\s*\t?((?:tile|tdp|ldtile|sttile)\w*)", text, re.M)
    return {(name, octets.replace(" ", "")) for octets, name in lines}


def vex(prefix: int, opcode: int, modrm: int, vvvv: int = 0) -> str:
    """VEX.128.<prefix>.0F38.W0 with registers below 8; prefix 0 none, 2 F3, 3 F2. Manual, volume 2, section 2.3."""
    return bytes([0xC4, 0xE2, (~vvvv & 15) << 3 | prefix, opcode, modrm]).hex()


def test_the_encodings_of_amx_are_those_of_the_manual(listing: Callable[[str], str]) -> None:
    """Sums are tiles 0..3, x 4 and 5, w 6 and 7; in a product the sum is ModRM.reg, x ModRM.rm and w VEX.vvvv."""
    found = tile_instructions(listing("amx"))
    for t, p in itertools.product((0, 1), (0, 1)):
        c, x, w = 2 * t + p, 4 + t, 6 + p
        assert ("tdpbssd", vex(3, 0x5E, 0xC0 | c << 3 | x, w)) in found, (t, p)
        assert ("tdpbsud", vex(2, 0x5E, 0xC0 | c << 3 | x, w)) in found, (t, p)
        assert ("tilezero", vex(3, 0x49, 0xC0 | c << 3)) in found, (t, p)
    assert ("tilerelease", vex(0, 0x49, 0xC0)) in found
    products = {row for row in found if row[0].startswith("tdp")}
    assert len(products) == 8  # and no other product
    # operands in memory: the second byte of VEX varies with the base, the opcode and the tile do not
    for name, opcode, prefix, tiles in (("tileloadd", "4b", 3, range(8)), ("tilestored", "4b", 2, range(4))):
        rows = [bytes.fromhex(octets) for n, octets in found if n == name]
        assert all(b[0] == 0xC4 and b[2] & 3 == prefix and f"{b[3]:02x}" == opcode and b[4] & 7 == 4 for b in rows)
        assert {b[4] >> 3 & 7 for b in rows} == set(tiles), name
    configs = [bytes.fromhex(octets) for n, octets in found if n == "ldtilecfg"]
    assert configs and all(b[0] == 0xC4 and b[2] == 0x78 and b[3] == 0x49 and b[4] >> 3 & 7 == 0 for b in configs)
    assert {name for name, _ in found} == {
        "tdpbssd", "tdpbsud", "tilezero", "tilerelease", "tileloadd", "tilestored", "ldtilecfg",
    }  # fmt: skip


@pytest.mark.parametrize("tier", ["scalar", "avx2", "avxvnni", "avx512vnni"])
def test_no_other_tier_has_tiles(listing: Callable[[str], str], tier: str) -> None:
    text = listing(tier)
    assert text.count("\n") > 1000 and tile_instructions(text) == set() and "tmm" not in text
