"""tests/test_transformers.py under other versions of transformers, each in an environment of its own under build/foreign.

    python tests/foreign/transformers_versions.py [VERSION ...]

Prints one line a version; exits 1 if any fails. Part of `make foreign`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from run import ROOT, Tool, environment

# what these versions want beside the packages of this environment
HUB = ("huggingface-hub==1.33.0", "tokenizers==0.22.2", "httpx==0.28.1", "httpcore==1.0.9")
VERSIONS = {version: (f"transformers=={version}", *HUB) for version in ("5.3.0", "5.12.0")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=list(VERSIONS), help=f"any of {', '.join(VERSIONS)}")
    asked = parser.parse_args().versions
    unknown = sorted(set(asked) - set(VERSIONS))
    if unknown:
        parser.error(f"version: found {unknown[0]}, accepted are {', '.join(VERSIONS)}")
    results = {}
    for version in asked:
        python = environment(f"transformers-{version}", Tool(VERSIONS[version], "", ()))
        says = [str(python), "-c", "import transformers; print(transformers.__version__)"]
        found = subprocess.run(says, capture_output=True, text=True, check=True).stdout.strip()
        if found != version:
            results[version] = f"no environment: found transformers {found}"
            continue
        tests = [str(python), "-m", "pytest", "-q", str(Path("tests") / "test_transformers.py")]
        code = subprocess.run(tests, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}).returncode
        results[version] = "passed" if code == 0 else "FAILED"
    for version, result in results.items():
        print(f"transformers {version:10}{result}")
    return 0 if set(results.values()) == {"passed"} else 1


if __name__ == "__main__":
    sys.exit(main())
