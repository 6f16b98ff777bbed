"""What the package without compiled kernels must do where it is installed: warn once at import, and compute."""

from __future__ import annotations

import warnings

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import lowbit
    from lowbit import functional, ops, selftest
ours = [str(w.message) for w in caught if "lowbit" in str(w.message)]
assert len(ours) == 1 and "slow reference" in ours[0], ours
assert "site-packages" in lowbit.__file__ and ops.cpu_isas() == ["reference"]
worst, results = selftest.of_tier("reference")
assert worst <= selftest.TOLERANCE and len(results) == 13 and callable(functional.w4a8_linear)
print(f"smoke: {lowbit.__file__}: plain torch, error {worst:.1e}; warned: {ours[0][:60]}…")
