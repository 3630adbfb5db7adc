"""The plan of a parameter: what tensor parallelism may do to it. Data only; nothing here moves a tensor."""

from __future__ import annotations

from enum import Enum


class Plan(Enum):
    """How a parameter is split over the ranks of a tensor-parallel group."""

    COLUMN = "column"  # output rows are split; the result is a shard
    ROW = "row"  # input columns are split; partial results are summed
    VOCABULARY = "vocabulary"  # rows of the vocabulary are split
    EXPERT = "expert"  # whole experts, or their inner width, are split
    REPLICATE = "replicate"  # every rank holds all of it
