"""Every body of every operation against its reference, over a table of shapes with 0, 1, odd and larger sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foveal import ops
from foveal.ops import library, reference
from foveal.ops.types import RouterRule

# float32 sums of a few hundred terms in another order: a few units in the last place of the largest term.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_both_bodies_can_be_chosen_and_the_choice_is_put_back() -> None:
    before = ops.chosen()
    assert before["attention"] == "library"
    with ops.forced("reference"):
        assert set(ops.chosen().values()) == {"reference"}
    assert ops.chosen() == before


@pytest.mark.parametrize("rows", [0, 1, 7, 33])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (5, 3), (64, 129)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    x, w = randn(rows, inputs), randn(outputs, inputs, seed=1)
    b = randn(outputs, seed=2) if has_bias else None
    torch.testing.assert_close(library.linear(x, w, b), reference.linear(x, w, b), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 8, 9, 40])
def test_linear_with_narrow_weights_stays_within_their_rounding(
    dtype: torch.dtype, rows: int
) -> None:
    x, w = randn(rows, 256), randn(96, 256, seed=1, dtype=dtype)
    out, exact = library.linear(x, w, None), reference.linear(x, w, None)
    assert out.dtype is torch.float32
    # Inputs and result are rounded once each to the narrow type: 2 * 2^-8 of a row's size is ample for both types.
    assert (out - exact).abs().max() < 2**-7 * exact.abs().max()


@pytest.mark.parametrize("rows", [1, 12])
def test_linear_in_float16_does_not_overflow(rows: int) -> None:
    x = randn(rows, 64) * 1e6
    w = torch.full((8, 64), 3.0, dtype=torch.float16)
    out = library.linear(x, w, None)
    assert torch.isfinite(out).all()
    assert (out - reference.linear(x, w, None)).abs().max() < 2e-3 * x.abs().sum()
    zero = library.linear(torch.zeros(rows, 64), w, None)
    assert torch.equal(zero, torch.zeros(rows, 8))


@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (5, 33)])
def test_rms_norm(shape: tuple[int, int]) -> None:
    x, w = randn(*shape) * 3, randn(shape[1], seed=1)
    torch.testing.assert_close(
        library.rms_norm(x, w, 1e-6), reference.rms_norm(x, w, 1e-6), **CLOSE
    )


@pytest.mark.parametrize(("new", "total"), [(1, 1), (1, 9), (4, 4), (3, 11), (16, 33)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_attention(new: int, total: int, heads: int, kv_heads: int) -> None:
    q, k, v = (
        randn(new, heads, 8),
        randn(total, kv_heads, 8, seed=1),
        randn(total, kv_heads, 8, seed=2),
    )
    expected = reference.attention(q, k, v, 0.3)
    torch.testing.assert_close(library.attention(q, k, v, 0.3), expected, **CLOSE)


def test_attention_is_causal_at_the_end_of_the_sequence() -> None:
    q, k, v = randn(3, 2, 4), randn(8, 2, 4, seed=1), randn(8, 2, 4, seed=2)
    changed = v.clone()
    changed[6:] += 5  # rows of the second and third query
    for attention in (reference.attention, library.attention):
        assert torch.equal(attention(q, k, v, 1.0)[0], attention(q, k, changed, 1.0)[0])


@pytest.mark.parametrize(("new", "total"), [(1, 1), (1, 9), (5, 5), (4, 20), (12, 30)])
@pytest.mark.parametrize(
    "form", [library.mla_absorbed, library.mla_expanded, library.mla_attention]
)
def test_mla_attention(form: Callable[..., Tensor], new: int, total: int) -> None:
    args = (
        randn(new, 4, 16),
        randn(new, 4, 8, seed=1),
        randn(total, 24, seed=2),
        randn(total, 8, seed=3),
        randn(4, 16 + 12, 24, seed=4) * 0.3,
        0.2,
    )
    torch.testing.assert_close(form(*args), reference.mla_attention(*args), **CLOSE)


def test_absorbed_equals_expanded_equals_interleaved_rotation_in_float64() -> None:
    """Spec 13, item 8: one algebra, three ways of writing it; rotating halves of the raw vector is another model."""
    new, total, heads, nope, rope, v_dim, rank = 9, 9, 3, 6, 8, 5, 10
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    q_nope, q_raw, latent = draw(new, heads, nope), draw(new, heads, rope), draw(total, rank)
    k_raw, kv_b = draw(total, 1, rope), draw(heads, nope + v_dim, rank)
    positions = torch.arange(total, dtype=torch.float64)
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope)
    cos, sin = angles.cos(), angles.sin()

    def rotate(rotation: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        return rotation(q_raw, cos, sin), rotation(k_raw, cos, sin)[:, 0]

    q_pe, k_pe = rotate(reference.rope_interleaved)
    expanded = reference.mla_attention(q_nope, q_pe, latent, k_pe, kv_b, 0.25)
    absorbed = library.mla_absorbed(q_nope, q_pe, latent, k_pe, kv_b, 0.25)
    assert (absorbed - expanded).abs().max() < 1e-12

    # The textbook interleaved form: results stay in place as neighbours.
    def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        turned = z * torch.complex(cos, sin)[:, None, :]
        return torch.view_as_real(turned).flatten(-2)

    q_pe, k_pe = rotate(neighbours)
    textbook = reference.mla_attention(q_nope, q_pe, latent, k_pe, kv_b, 0.25)
    assert (textbook - expanded).abs().max() < 1e-12
    q_pe, k_pe = rotate(reference.rope_half)
    halves = reference.mla_attention(q_nope, q_pe, latent, k_pe, kv_b, 0.25)
    assert (halves - expanded).abs().max() > 1e-3


@pytest.mark.parametrize(("tiles", "patches"), [(1, 1), (2, 9), (3, 25)])
def test_encoder_attention(tiles: int, patches: int) -> None:
    q, k, v = (randn(tiles, patches, 3, 8, seed=s) for s in range(3))
    expected = reference.encoder_attention(q, k, v, 0.4)
    torch.testing.assert_close(library.encoder_attention(q, k, v, 0.4), expected, **CLOSE)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(0, 4, 2), (1, 4, 2), (7, 5, 5), (33, 8, 3), (2, 1, 1)]
)
def test_moe(tokens: int, experts: int, top_k: int) -> None:
    x = randn(tokens, 16)
    logits = randn(tokens, experts, seed=1)
    weights, ids = ops.route(logits, None, RouterRule(top_k))
    w13, w2 = randn(experts, 20, 16, seed=2), randn(experts, 16, 10, seed=3)
    expected = reference.moe(x, weights, ids, w13, w2)
    torch.testing.assert_close(library.moe(x, weights, ids, w13, w2), expected, **CLOSE)


def test_moe_of_a_row_does_not_depend_on_its_neighbours() -> None:
    x, logits = randn(9, 16), randn(9, 6, seed=1)
    weights, ids = ops.route(logits, None, RouterRule(2))
    w13, w2 = randn(6, 20, 16, seed=2), randn(6, 16, 10, seed=3)
    whole = ops.moe(x, weights, ids, w13, w2)
    alone = torch.cat(
        [ops.moe(x[i : i + 1], weights[i : i + 1], ids[i : i + 1], w13, w2) for i in range(9)]
    )
    torch.testing.assert_close(whole, alone, **CLOSE)
