"""Muon: momentum whose matrix updates are made orthogonal. For weights of two dimensions, or stacks of them.

Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). torch's own class takes
single matrices only; the experts here are stacks, and equal shapes are worked on together, which on two cores saves
time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

# Coefficients of the quintic Newton-Schulz step; they drive singular values to about one in five steps.
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5


def orthogonalise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest (half-)orthogonal matrices to `x` [N, rows, columns], roughly; float32."""
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = (y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(STEPS):
        gram = y @ y.mT
        y = A * y + (B * gram + C * gram @ gram) @ y
    return (y.mT if tall else y).float()


class Muon(torch.optim.Optimizer):
    """Stochastic gradient descent with Nesterov momentum and orthogonal updates, scaled by sqrt(max(1, rows /
    columns)).
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.01,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            same: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"])
                same[p.shape].append((p, update.reshape(-1, *p.shape[-2:])))
            for shape, pairs in same.items():
                updates = orthogonalise(torch.cat([u for _, u in pairs]), self.dtype)
                scale = max(1.0, shape[-2] / shape[-1]) ** 0.5
                for (p, _), update in zip(pairs, updates.chunk(len(pairs)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update.reshape(shape), alpha=-group["lr"] * scale)
