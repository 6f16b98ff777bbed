"""The two launches that end a decoding step, against the same in torch."""

from __future__ import annotations

import pytest
import torch

from lowbit import ops_cuda
from lowbit.engines import omnivoice_step

WHY = ops_cuda.refuses(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY is not None, reason=WHY or "")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("frames", "classes"), [(1, 1025), (37, 1025), (250, 1025), (5, 33)])
def test_scores_are_those_of_torch(frames: int, classes: int, dtype: torch.dtype) -> None:
    torch.manual_seed(frames)
    device = "cuda:0"
    logits = (3 * torch.randn(2, 2, frames, 8, classes, device=device)).to(dtype)
    noise, penalty = torch.rand(2, 8, frames, device=device), torch.arange(8.0, device=device)[:, None] * 5
    guidance, temperature = torch.tensor(2.0, device=device), torch.tensor(5.0, device=device)
    valid = torch.rand(2, 1, frames, device=device) < 0.8
    mask = classes - 1
    tokens = torch.where(torch.rand(2, 8, frames, device=device) < 0.5, mask, 3)
    pred, score = ops_cuda.guided_score(logits, guidance, penalty, temperature, noise, valid, tokens, mask)
    want, best = omnivoice_step.score(logits[0].float(), logits[1].float(), guidance, mask)
    want, best = want.transpose(1, 2), best.transpose(1, 2)
    final = ((best - penalty) * temperature.reciprocal() + noise).masked_fill(~valid | (tokens != mask), -torch.inf)
    z = logits[0].float() + guidance * (logits[0].float() - logits[1].float())
    chosen = z.transpose(1, 2).gather(-1, pred.permute(0, 2, 1)[..., None].transpose(1, 2))  # ties may differ
    likeliest = z.transpose(1, 2).gather(-1, want.permute(0, 2, 1)[..., None].transpose(1, 2))
    assert torch.equal(chosen, likeliest)
    assert torch.equal(score.isinf(), final.isinf())
    assert torch.allclose(score, final, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("slots", [1, 8, 500, 2000, 12288])
def test_the_largest_slots_are_revealed(slots: int) -> None:
    torch.manual_seed(slots)
    device = "cuda:0"
    score = torch.randn(4, slots, device=device)
    score[2, ::3] = -torch.inf
    pred = torch.randint(1, 1000, (4, slots), device=device)
    for count in (0, 1, slots // 2, slots):
        k = torch.tensor([count, max(count - 1, 0), count, 0], device=device)
        tokens = torch.full((4, slots), -1, device=device)
        want = tokens.clone()
        ops_cuda.reveal(tokens, pred, score, k)
        for item in range(4):
            here = score[item].topk(int(k[item])).indices
            here = here[score[item][here] > -torch.inf]
            want[item, here] = pred[item, here]
        assert torch.equal(tokens, want), count


def test_of_equal_scores_the_first_are_revealed() -> None:
    score = torch.zeros(1, 100, device="cuda:0")
    score[0, 70] = 1
    tokens = torch.zeros(1, 100, dtype=torch.int64, device="cuda:0")
    ops_cuda.reveal(tokens, torch.ones_like(tokens), score, torch.tensor([4], device="cuda:0"))
    assert tokens[0].nonzero()[:, 0].tolist() == [0, 1, 2, 70]
