"""The release's rounding, simulated: its elements against the specification, the whole against golden logits."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveal import ops
from foveal.errors import PromptError
from foveal.models.build import load_v4
from foveal.models.fidelity import (
    EXACT,
    ROUNDINGS,
    Fidelity,
    Rounding,
    check_fidelity,
    hadamard,
    power_of_two_above,
    round_fp4,
    round_fp8,
)
from foveal.models.layers import Factory, Linear, RMSNorm
from foveal.models.v4 import V4Model
from foveal.models.v4_config import V4Config
from foveal.runner.v4_cache import V4SequenceCache
from foveal.runner.v4_runner import V4Runner
from tests import v4_toy
from tests.golden import v4_cases

RELEASE = ROUNDINGS["release-rounding"]


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values).to(torch.bfloat16)


# --- elements ---------------------------------------------------------------------------------------


def test_the_fp8_vector_of_the_specification() -> None:
    found = round_fp8(bf16(1, 0.3, -0.7, 0.01, 0, 3e-5, -0.123, 0.5), 8)
    expected = bf16(1, 0.3125, -0.6875, 0.009765625, 0, 3.0517578e-5, -0.125, 0.5)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


def test_the_fp4_vector_of_the_specification() -> None:
    found = round_fp4(bf16(1, 0.3, -0.7, 0.01, 0.11, -0.2, 0.45, 0.9), 8)
    assert torch.equal(found, bf16(1, 0.25, -0.75, 0, 0.125, -0.25, 0.5, 1))


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(1.0, -8), (0.875, -9), (3.5, -7), (448, 0), (447, 0), (449, 1), (1e-4, -22), (1e-30, -22)],
)
def test_fp8_scales_of_the_specification(largest: float, exponent: int) -> None:
    # A number of one unit of the scale's smallest code is kept; half of it goes to the even code, zero.
    unit = 2.0 ** (exponent - 9)
    x = torch.tensor([largest, unit, unit / 2, 3 * unit / 2])
    assert round_fp8(x, 4)[1:].tolist() == [unit, 0, 2 * unit]


def test_fp4_ties_go_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    expected = [0, 1, 1, 2, 2, 4, 4]
    x = torch.tensor([6.0, *ties])
    assert round_fp4(x, 8).tolist() == [6, *expected]
    assert round_fp4(-x, 8).tolist() == [-6, *(-e for e in expected)]


@pytest.mark.parametrize(("largest", "rounding"), [(448, round_fp8), (6, round_fp4)])
def test_the_float32_reciprocal_gives_the_exact_scale_for_every_mantissa(
    largest: int, rounding: object
) -> None:
    bits = torch.arange(0x3F80, 0x4080, dtype=torch.int16)  # bfloat16 numbers in [1, 4)
    reach = bits.view(torch.bfloat16).float()
    found = power_of_two_above(reach * torch.tensor(1 / largest, dtype=torch.float32))
    exact = [2.0 ** math.ceil(math.log2(value / largest)) for value in reach.tolist()]
    assert found.tolist() == exact


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40))
def test_rounding_stays_within_half_a_step_and_keeps_signs(values: list[float]) -> None:
    x = torch.tensor(values)
    for rounding, block, relative, smallest in (
        (round_fp8, 16, 2**-4, 2**-10),
        (round_fp4, 16, 2**-2, 2**-2),
    ):
        found = rounding(x, block)
        for at in range(0, len(values), block):
            part, result = x[at : at + block], found[at : at + block]
            # Scales bring the largest number to between half of 448 (or 6) and all of it; steps grow with size.
            scale = max(float(part.abs().max()), 1e-4) / (224 if rounding is round_fp8 else 3)
            assert ((result - part).abs() <= part.abs() * relative + smallest * scale).all()
            assert (result * part >= 0).all()


def test_a_last_block_that_is_not_full_is_its_own() -> None:
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    found = round_fp8(x, 64)
    assert torch.equal(found[:, :64], round_fp8(x[:, :64].contiguous(), 64))
    assert torch.equal(found[:, 64:], round_fp8(x[:, 64:].contiguous(), 36))


@pytest.mark.parametrize("width", [1, 2, 32, 128])
def test_hadamard_is_the_matrix_in_natural_order(width: int) -> None:
    matrix = torch.tensor(
        [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    )
    x = torch.randn(5, 2, width, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(hadamard(x), x @ matrix * width**-0.5, atol=1e-6)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-6)
    assert hadamard(x.to(torch.bfloat16)).dtype is torch.bfloat16


# --- hooks ------------------------------------------------------------------------------------------


def test_plain_passes_everything_through() -> None:
    x = torch.randn(2, 64)
    assert EXACT.narrow(x) is x
    assert EXACT.operand(x) is x
    assert EXACT.key_rows(x, 16) is x
    assert EXACT.index_rows(x) is x
    assert Factory().rounding is EXACT


def test_keys_keep_their_rotated_dims() -> None:
    x = torch.randn(4, 80, generator=torch.Generator().manual_seed(0))
    found = Rounding(keys=True).key_rows(x, 16)
    assert torch.equal(found[:, 64:], x[:, 64:])
    assert torch.equal(found[:, :64], round_fp8(x[:, :64].contiguous(), 64))
    both = Rounding(keys=True, bfloat16=True).key_rows(x, 16)
    assert torch.equal(both, both.to(torch.bfloat16).float())


def test_query_heads_are_normed_in_bfloat16_step_by_step() -> None:
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0))
    found = RELEASE.head_norm(q, 1e-6)
    narrow = q.to(torch.bfloat16)
    mean = (narrow * narrow).float().mean(-1, keepdim=True).to(torch.bfloat16)
    factor = torch.rsqrt((mean.float() + 1e-6).to(torch.bfloat16).float()).to(torch.bfloat16)
    assert torch.equal(found, (narrow.float() * factor.float()).to(torch.bfloat16).float())
    exact = EXACT.head_norm(q, 1e-6)
    assert 1e-4 < (found - exact).abs().max() < 0.1


def test_rounded_experts_equal_the_steps_written_down() -> None:
    generator = torch.Generator().manual_seed(1)
    w13, w2 = (torch.randn(shape, generator=generator) / 8 for shape in ((4, 48, 64), (4, 64, 24)))
    x = torch.randn(5, 64, generator=generator).to(torch.bfloat16).float()
    ids = torch.rand(5, 4, generator=generator).topk(2, -1).indices
    shares = torch.rand(5, 2, generator=generator)
    found = RELEASE.moe(x, shares, ids, w13, w2, 1.5)
    for token in range(5):
        total = torch.zeros(64)
        for expert, share in sorted(zip(ids[token].tolist(), shares[token].tolist(), strict=True)):
            row = round_fp8(x[token], 128)
            gate, up = (w13[expert] @ row).to(torch.bfloat16).float().chunk(2)
            gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
            inner = (gate * gate.sigmoid() * up * share).to(torch.bfloat16).float()
            total += (w2[expert] @ round_fp8(inner, 128)).to(torch.bfloat16).float()
        assert torch.allclose(found[token], total, atol=2e-3)  # a sum may fall to the other side
    assert torch.equal(
        EXACT.moe(x, shares, ids, w13, w2, 1.5), ops.moe(x, shares, ids, w13, w2, 1.5)
    )


def test_exactly_the_release_s_products_are_rounded() -> None:
    model = V4Model(v4_toy.config(), language=Factory(rounding=RELEASE))
    rounded = {
        name.split(".", 3)[-1]
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module.rounding.products
    }
    attention = {f"attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_b", "indexer.wq_b")}
    assert rounded == attention | {"ffn.shared.gate_up", "ffn.shared.down"}
    others = {
        name
        for name, module in model.named_modules()
        if isinstance(module, Linear | RMSNorm) and module.rounding is EXACT
    }
    assert {"language.lm_head", "language.embed_tokens"} <= others
    assert {"language.layers.1.attn.wo_a", "language.layers.1.attn.indexer.weights_proj"} <= others
    assert any(name.startswith("vision.") for name in others)


def test_unknown_modes_are_refused() -> None:
    for name in ROUNDINGS:
        check_fidelity(name)
    with pytest.raises(
        PromptError, match="'fp8' is unknown; choose one of plain, cache-rounding, release-rounding"
    ):
        check_fidelity("fp8")


# --- the whole --------------------------------------------------------------------------------------


@cache
def loaded(variant: Path, fidelity: Fidelity) -> V4Model:
    folder = variant / "checkpoint"
    config = V4Config.load(folder)
    loaded = load_v4(folder, config, dtype="float32", device="cpu", fidelity=fidelity)
    assert loaded.fidelity == fidelity
    return loaded.model


# Cases in which no number lies so near a rounding step that two orders of sums part there.
STEADY = [
    ("flash_like", "len_128"),
    ("flash_like", "len_129"),
    ("pro_like", "len_128"),
    ("flash_fp8_fp4", "len_129"),
    ("flash_fp8_fp4", "len_300"),
]
PARTED = [("flash_like", "len_300"), ("pro_like", "len_129"), ("pro_like", "len_300")]


@pytest.mark.parametrize(("variant", "name"), STEADY + PARTED)
def test_cache_rounding_equals_the_golden_logits_with_rounding(
    golden: Path, variant: str, name: str
) -> None:
    folder = golden / "v4_text" / variant
    case = v4_cases.read_case(folder / "cases" / f"{name}.json")
    expected = case.tensors["logits_qat_last32"][0]
    found = v4_cases.engine_logits(loaded(folder, "cache-rounding"), case)[-32:]
    plain = v4_cases.engine_logits(loaded(folder, "plain"), case)[-32:]
    error, effect = (found - expected).abs(), (plain - expected).abs()
    if (variant, name) in STEADY:
        assert error.max() < 2e-4
    # One step to the other side moves many later numbers a little: far less than the rounding itself does.
    assert error.mean() < effect.mean() / 8


def test_release_rounding_changes_logits_but_not_the_model(golden: Path) -> None:
    folder = golden / "v4_text" / "flash_fp8_fp4"
    case = v4_cases.read_case(folder / "cases" / "len_129.json")
    plain, rounded = (
        v4_cases.engine_logits(loaded(folder, mode), case) for mode in ("plain", "release-rounding")
    )
    assert (plain - rounded).abs().max() > 0.1
    assert torch.cosine_similarity(plain, rounded, -1).mean() > 0.97


@pytest.mark.parametrize("mode", ["cache-rounding", "release-rounding"])
def test_the_cache_holds_what_the_rounding_gives(mode: Fidelity) -> None:
    exact = v4_toy.model(vision=False, index_head_dim=32)
    model = V4Model(exact.config, language=Factory(rounding=ROUNDINGS[mode]))
    model.load_state_dict(exact.state_dict())
    ids = torch.randint(0, 120, (140,), generator=torch.Generator().manual_seed(3))
    runner, cache = V4Runner(model), V4SequenceCache(model.config.language, 200)
    runner.prefill(model.embed(ids), cache, ids=ids, chunk_size=33)
    rotated = model.config.language.qk_rope_head_dim
    layer = cache.layers[1]
    assert layer.main is not None
    assert layer.index is not None
    keys = torch.cat((layer.window.rows, layer.main.entries[:35]))[:, :-rotated]
    assert torch.equal(keys, round_fp8(keys, 64))
    assert keys.abs().max() > 0
    index = layer.index.entries[:35]
    assert torch.equal(index, round_fp4(index))
    narrow = replace(ROUNDINGS[mode], products=False).bfloat16
    assert torch.equal(layer.window.rows, layer.window.rows.bfloat16().float()) is narrow
