"""What `models.py` runs in each runtime. Standard library only, as in every module that its workers import."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

Job = dict[str, Any]


class Engine:
    """One loaded model: ``prefill`` starts over and gives the first new token, ``step`` the next, both greedy.

    ``weight_bytes``: of the weights as they are held, or of the file where the runtime does not say.
    """

    weight_bytes = 0
    version = ""
    _last: Any = None

    def logits(self) -> Any:
        """float32 [V] of the last token, as numpy has it; None where the runtime does not give them."""
        return self._last

    def prefill(self, ids: Sequence[int]) -> int:
        raise NotImplementedError

    def step(self, token: int) -> int:
        raise NotImplementedError

    def generate(self, ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """``count`` new tokens and the seconds from the start to each."""
        began = time.perf_counter()
        tokens, times = [self.prefill(ids)], [time.perf_counter() - began]
        while len(tokens) < count:
            tokens.append(self.step(tokens[-1]))
            times.append(time.perf_counter() - began)
        return tokens, times
