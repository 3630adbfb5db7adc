"""Loading a model for a command: a bar on a terminal, and a thread count that suits the model's size."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foveal.llm import LLM

# Below this many parameters one product takes microseconds, and waking a second thread costs more than it brings:
# `verify` on a golden checkpoint (1 M) takes 6 s of CPU time with one thread and 11 s with two on an idle machine,
# and many times as long where other programs keep the cores busy.
SMALL_MODEL_PARAMETERS = 20_000_000


def load_llm(model: str, *, is_quiet: bool, **options: Any) -> LLM:
    """The model for this process. Raises what `LLM` raises."""
    from foveal.llm import LLM

    with _loading_bar(is_wanted=not is_quiet) as progress:
        llm = LLM(model, progress=progress, **options)
    _limit_threads(llm)
    return llm


@contextmanager
def _loading_bar(*, is_wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A callback `(bytes done, bytes in all)` that draws the bar, or None where nobody would see one."""
    if not (is_wanted and sys.stderr.isatty()):
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc="loading", unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _limit_threads(llm: LLM) -> None:
    """One thread for small models on a CPU, unless OMP_NUM_THREADS says otherwise."""
    import torch

    count = sum(parameter.numel() for parameter in llm.model.parameters())
    on_cpu = llm.model.device.type == "cpu"
    if on_cpu and count < SMALL_MODEL_PARAMETERS and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
