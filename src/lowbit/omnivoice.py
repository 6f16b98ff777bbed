"""OmniVoice's generation as a few graph replays: ``accelerate(model)`` and ``restore(model)``. docs/omnivoice.md."""

from __future__ import annotations

from lowbit.engines.omnivoice import Engine, accelerate, engine_of, restore

__all__ = ["Engine", "accelerate", "engine_of", "restore"]
