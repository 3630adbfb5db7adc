from __future__ import annotations

import math

import torch

from foveal.models.layers import rotary_table
from foveal.ops import reference
from tests import toy


def test_angles_survive_a_cast_of_the_model() -> None:
    """Casting everything to bfloat16 must not touch frequencies or positions (spec trap 10)."""
    model = toy.model()
    positions = torch.arange(2101)
    before = model.language.rope(positions)
    model.to(torch.bfloat16)
    after = model.language.rope(positions)
    assert torch.equal(before[0], after[0])
    assert after[0].dtype is torch.float32
    assert len(torch.unique(after[1][:, -1])) == 2101, "each position has its own angle"


def test_halves_and_neighbours_are_different_rotations() -> None:
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(3.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    half = reference.rope_half(x, angles.cos(), angles.sin())
    j, p = 2, 1
    a = angles[p, j]
    assert torch.allclose(half[p, 0, j], x[p, 0, j] * a.cos() - x[p, 0, j + 4] * a.sin())
    assert torch.allclose(half[p, 0, j + 4], x[p, 0, j + 4] * a.cos() + x[p, 0, j] * a.sin())
    inter = reference.rope_interleaved(x, angles.cos(), angles.sin())
    assert torch.allclose(inter[p, 0, j], x[p, 0, 2 * j] * a.cos() - x[p, 0, 2 * j + 1] * a.sin())
    assert torch.allclose(
        inter[p, 0, j + 4], x[p, 0, 2 * j + 1] * a.cos() + x[p, 0, 2 * j] * a.sin()
    )


def test_linear_scaling_divides_positions() -> None:
    scaled = toy.config(toy.MHA | {"rope_scaling": {"type": "linear", "factor": 4.0}}).language
    plain = toy.config().language
    positions = torch.arange(0, 40, 4)
    assert torch.allclose(
        rotary_table(scaled)(positions)[0], rotary_table(plain)(positions // 4)[0], atol=1e-6
    )


def test_dynamic_scaling_changes_nothing_within_the_context() -> None:
    dynamic = toy.config(toy.MHA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}).language
    assert torch.equal(rotary_table(dynamic).inv_freq, rotary_table(toy.config().language).inv_freq)


def test_yarn_frequencies_follow_the_formula() -> None:
    """Spec 6.5 with its own loop: fast pairs keep their frequency, slow ones are divided by the factor."""
    c = toy.config("mla-yarn").language
    table = rotary_table(c)
    d, base, factor, trained = 8, 10000.0, 4.0, 64

    def corr(n: float) -> float:
        return d * math.log(trained / (2 * math.pi * n)) / (2 * math.log(base))

    lo, hi = max(math.floor(corr(32)), 0), min(math.ceil(corr(1)), d - 1)
    for j in range(d // 2):
        ramp = min(max((j - lo) / (hi - lo if hi != lo else 0.001), 0), 1)
        fe = base ** (-2 * j / d)
        expected = fe / factor * ramp + fe * (1 - ramp)
        assert math.isclose(table.inv_freq[j].item(), expected, rel_tol=1e-5)
    m = 0.1 * 0.7 * math.log(factor) + 1
    assert math.isclose(table.softmax_factor, m * m)
    assert table.scale == 1.0, "mscale equals mscale_all_dim"
