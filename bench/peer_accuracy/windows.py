"""Write the windows of a text that `lowbit quantize` calibrates on as JSON rows of token ids, for the peers.

PYTHONPATH=src python bench/peer_accuracy/windows.py MODEL TEXT OUT [--tokens 32768] [--window 256] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lowbit.models.calibration_inputs import TOKENS, WINDOW, digest, read_calibration


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("text", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--tokens", type=int, default=TOKENS)
    p.add_argument("--window", type=int, default=WINDOW)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()

    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    batches = read_calibration(args.text, tokenizer, tokens=args.tokens, window=args.window, seed=args.seed)
    rows = [row for batch in batches for row in batch.inputs["input_ids"].tolist()]
    args.out.write_text(json.dumps(rows) + "\n", "utf-8")
    print(f"{len(rows)} rows of {len(rows[0])} tokens, sha256 {digest(batches)[:16]}")


if __name__ == "__main__":
    main()
