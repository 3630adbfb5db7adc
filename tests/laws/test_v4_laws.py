"""Laws of the DeepSeek-V4 backbone on toy models with all layer kinds: every way of splitting the work is one answer.

The slow truth is `reference_v4_forward`. The bound of 2e-4 is what two correct float32 implementations keep.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foveal.models.reference_v4 import reference_v4_forward
from foveal.models.v4 import V4Model
from foveal.runner.v4_cache import MARGIN, Span, V4SequenceCache
from foveal.runner.v4_runner import V4Runner
from tests import v4_toy

LIMIT = 2e-4
LENGTH = 150
SPAN = Span(
    43, 92
)  # longer than the window of 16; begins at 3 mod 4 and ends at 0 mod 4, as pictures do
OTHER = Span(103, 112)


@pytest.fixture(scope="module")
def model() -> V4Model:
    return v4_toy.model()


def request(model: V4Model, *spans: Span) -> tuple[Tensor, Tensor]:
    """Rows and raw ids of a random request; ids inside spans are those of pictures."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.language.vocab_size
    ids = torch.randint(3, vocabulary, (LENGTH,), generator=generator)
    for span in spans:
        inside = slice(span.start, span.end + 1)
        ids[inside] = vocabulary + 2
        ids[span.start], ids[span.end] = vocabulary, vocabulary + 4
    noise = torch.randn(LENGTH, model.config.language.hidden_size, generator=generator)
    rows = torch.where((ids >= vocabulary)[:, None], noise, model.embed(ids))
    return rows, ids


def run(model: V4Model, cache: V4SequenceCache, rows: Tensor, ids: Tensor, chunk: int) -> Tensor:
    runner = V4Runner(model)
    return runner.logits(runner.prefill(rows, cache, ids=ids, chunk_size=chunk))


def new_cache(model: V4Model, *spans: Span) -> V4SequenceCache:
    return V4SequenceCache(model.config.language, LENGTH + MARGIN, spans=spans)


@pytest.mark.parametrize("chunk", [LENGTH, 1, 3, 7, 64, 100, 127, 128, 129])
@pytest.mark.parametrize("spans", [(), (SPAN,), (SPAN, OTHER)])
def test_chunked_prefill_equals_the_whole_sequence(
    model: V4Model, chunk: int, spans: tuple[Span, ...]
) -> None:
    rows, ids = request(model, *spans)
    expected = reference_v4_forward(model.language, rows, ids, [(s.start, s.end) for s in spans])
    assert expected.std() > 0.5, "a degenerate model would prove nothing"
    found = run(model, new_cache(model, *spans), rows, ids, chunk)
    gaps = (found - expected).abs().amax(-1)
    assert gaps.max() < LIMIT, (
        f"first difference at {int((gaps >= LIMIT).nonzero()[0])}, worst {gaps.max():.2e}"
    )


@pytest.mark.parametrize("at", [4, 5, 8, 11, 12, 127, 128, 129, 130, 132])
@pytest.mark.parametrize("back", [1, 2, 3, 4, 5, 6, MARGIN])
def test_rollback_is_a_smaller_counter(model: V4Model, at: int, back: int) -> None:
    """Tokens that were wrong leave garbage in rings and entries; going on from before them must not see it."""
    if back > at:
        pytest.skip("nothing to go back to")
    rows, ids = request(model)
    expected = reference_v4_forward(model.language, rows, ids)
    cache = new_cache(model)
    start = at - back
    run(model, cache, rows[:start], ids[:start], LENGTH) if start else None
    wrong = torch.flip(ids, (0,))[:back]
    run(model, cache, model.embed(wrong), wrong, LENGTH)
    cache.num_computed_tokens = start
    found = run(model, cache, rows[start:], ids[start:], LENGTH)
    assert (found - expected[start:]).abs().max() < LIMIT


@pytest.mark.parametrize(
    ("end", "legal"), [(43, 43), (44, 93), (92, 93), (93, 93), (94, 94), (104, 113)]
)
def test_a_chunk_end_inside_a_picture_moves_behind_it(model: V4Model, end: int, legal: int) -> None:
    assert new_cache(model, SPAN, OTHER).legal_end(end) == legal


def test_batched_equals_alone(model: V4Model) -> None:
    runner = V4Runner(model)
    rows, ids = request(model, SPAN)
    spans = [(SPAN,), (), ()]
    parts = [slice(0, 120), slice(110, 150), slice(100, 131)]
    caches = [new_cache(model, *s) for s in spans]
    first = [slice(p.start, p.stop - 2) for p in parts]
    hidden = runner.extend(caches, [rows[p] for p in first], [ids[p] for p in first])
    pieces = list(runner.logits(hidden).split([p.stop - p.start for p in first]))
    for step in (-2, -1):
        ends = [slice(p.stop + step, p.stop + step + 1) for p in parts]
        later = runner.logits(
            runner.extend(caches, [rows[p] for p in ends], [ids[p] for p in ends])
        )
        pieces = [torch.cat((piece, later[i : i + 1])) for i, piece in enumerate(pieces)]
    for part, found, own in zip(parts, pieces, spans, strict=True):
        expected = reference_v4_forward(
            model.language, rows[part], ids[part], [(s.start, s.end) for s in own]
        )
        assert (found - expected).abs().max() < LIMIT


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_other_scoring_functions_run(scoring: str) -> None:
    model = v4_toy.model(scoring_func=scoring)
    rows, ids = request(model)
    expected = reference_v4_forward(model.language, rows, ids)
    found = run(model, new_cache(model), rows, ids, 33)
    assert (found - expected).abs().max() < LIMIT


def test_text_logits_do_not_depend_on_the_vision_half() -> None:
    """Image limit 0 builds no tower; text must be bit-equal."""
    with_tower = v4_toy.model()
    without = V4Model(with_tower.config, with_vision=False)
    without.load_state_dict(
        {k: v for k, v in with_tower.state_dict().items() if k.startswith("language.")}
    )
    assert not hasattr(without, "vision")
    rows, ids = request(with_tower)
    assert torch.equal(
        run(with_tower, new_cache(with_tower), rows, ids, 64),
        run(without, new_cache(without), rows, ids, 64),
    )


def test_C021_bias_vl_decides_for_pictures_in_every_layer_and_for_nothing_else(
    model: V4Model,
) -> None:
    biased = v4_toy.model()
    _, ids = request(biased, SPAN)
    x = torch.randn(LENGTH, 48, generator=torch.Generator().manual_seed(5))
    is_picture = ids >= 120
    for layer, plain in zip(biased.language.layers, model.language.layers, strict=True):
        layer.ffn.router.bias_vl.data.zero_()
        layer.ffn.router.bias_vl.data[3] = 100.0
        _, experts = layer.ffn.router(x, ids)
        assert (experts[is_picture] == 3).any(-1).all(), "expert 3 wins for every picture token"
        _, before = plain.ffn.router(x, ids)
        assert torch.equal(experts[~is_picture], before[~is_picture]), "text is unchanged"


def test_state_bytes_per_token_are_those_of_the_design() -> None:
    """At the real configuration the growing part is 6.9 KB a token in bfloat16 (engine.md, section 1)."""
    ratios = [0, 0] + [4, 128] * 20 + [4]
    per_token = sum((512 + (128 if r == 4 else 0)) / r for r in ratios if r) * 2
    assert ratios.count(4) == 21
    assert ratios.count(128) == 20
    assert round(per_token) == 6880
