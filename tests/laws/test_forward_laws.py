"""Laws of the language model's forward pass, for every kind of attention and routing.

The slow truth is `reference_forward`: whole sequence, no cache. Logits here have a standard deviation of a few units;
2e-4 is the bound that two correct float32 implementations keep (rounding in another order).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foveal import ops
from foveal.models.reference_vl2 import reference_forward
from foveal.models.vl2 import VL2Model
from foveal.runner.cache import SequenceCache
from foveal.runner.runner import VL2Runner
from tests import toy

LIMIT = 2e-4
LENGTH = 45


@pytest.fixture(scope="module", params=list(toy.LANGUAGES))
def model(request: pytest.FixtureRequest) -> VL2Model:
    return toy.model(request.param)


def difference(found: Tensor, expected: Tensor) -> str:
    gaps = (found - expected).abs().amax(-1)
    worst = int(gaps.argmax())
    return f"worst at row {worst}: {gaps[worst]:.2e} apart"


@pytest.mark.parametrize("chunk", [LENGTH, 1, 7, 16])
def test_chunked_prefill_equals_the_whole_sequence(model: VL2Model, chunk: int) -> None:
    runner, rows = VL2Runner(model), toy.rows(model, LENGTH)
    expected = reference_forward(model, rows)
    assert expected.std() > 0.5, "a degenerate model would prove nothing"
    found = runner.logits(runner.prefill(rows, runner.new_cache(LENGTH), chunk_size=chunk))
    assert (found - expected).abs().max() < LIMIT, difference(found, expected)


def test_reference_bodies_give_the_same_answer(model: VL2Model) -> None:
    runner, rows = VL2Runner(model), toy.rows(model, LENGTH)
    with ops.forced("reference"):
        found = runner.logits(runner.prefill(rows, runner.new_cache(LENGTH), chunk_size=16))
    expected = reference_forward(model, rows)
    assert (found - expected).abs().max() < LIMIT, difference(found, expected)


def test_batched_equals_alone(model: VL2Model) -> None:
    """Three requests of different lengths, in one pass and then token by token, equal each alone."""
    runner = VL2Runner(model)
    pieces = [toy.rows(model, count, seed=count) for count in (5, 17, 11)]
    caches = [runner.new_cache(20) for _ in pieces]
    first = runner.logits(runner.extend(caches, [piece[:-2] for piece in pieces]))
    ends = [[piece[len(piece) - i :][:1] for piece in pieces] for i in (2, 1)]
    later = [runner.logits(runner.extend(caches, end)) for end in ends]
    at = 0
    for index, piece in enumerate(pieces):
        expected = reference_forward(model, piece)
        count = len(piece) - 2
        found = torch.cat(
            (first[at : at + count], later[0][index : index + 1], later[1][index : index + 1])
        )
        assert (found - expected).abs().max() < LIMIT, (
            f"request {index}: {difference(found, expected)}"
        )
        at += count


def test_going_back_is_lowering_the_counter(model: VL2Model) -> None:
    """Rejected tokens leave garbage behind the counter; what is computed next must not see it."""
    runner, rows = VL2Runner(model), toy.rows(model, LENGTH)
    cache = runner.new_cache(LENGTH)
    runner.extend([cache], [rows[:30]])
    runner.extend([cache], [toy.rows(model, 6, seed=99)])
    cache.num_computed_tokens = 30
    found = runner.logits(runner.extend([cache], [rows[30:]]))
    expected = reference_forward(model, rows)[30:]
    assert (found - expected).abs().max() < LIMIT, difference(found, expected)


def test_cache_that_is_too_small_is_an_error() -> None:
    model = toy.model()
    cache = SequenceCache(model.config.language, 3)
    with pytest.raises(AssertionError, match="cache of 3 rows cannot hold 4"):
        VL2Runner(model).extend([cache], [toy.rows(model, 4)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("language", ["mha", "mla", "mla-noaux", "mla-groups"])
def test_half_precision_stays_close_and_finite(language: str, dtype: torch.dtype) -> None:
    """The toy weights are exact in bfloat16, so only arithmetic differs (spec 6.9)."""
    exact, half = toy.model(language), toy.model(language, dtype=dtype)
    rows = toy.rows(exact, LENGTH)
    found = []
    for model in (exact, half):
        runner = VL2Runner(model)
        found.append(runner.logits(runner.prefill(rows, runner.new_cache(LENGTH), chunk_size=16)))
    assert torch.isfinite(found[1]).all()
    cosine = torch.nn.functional.cosine_similarity(found[0], found[1], dim=-1)
    assert cosine.mean() >= 0.999, f"mean {cosine.mean():.5f}, worst {cosine.min():.5f}"


def test_float16_survives_a_residual_stream_beyond_its_range() -> None:
    """Base scales routed experts by 2, so its stream outgrows float16 (limit 65,504); ours is float32."""
    model = toy.model("mla-noaux", dtype=torch.float16)
    model.language.embed_tokens.weight.data.mul_(3000)
    for layer in model.language.layers:
        layer.attn.o.weight.data.mul_(2000)
    runner, rows = VL2Runner(model), toy.rows(model, 20)
    assert torch.isfinite(runner.logits(runner.prefill(rows, runner.new_cache(20)))).all()
