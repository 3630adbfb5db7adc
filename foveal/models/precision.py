"""In which number types a model is kept and computed, and why.

Weights are kept in the chosen dtype. The rows that go into the big products are float32 on CPUs, whatever the weights
are; on GPUs they have the weights' type, except for float16, whose range is too small. Norms, router, softmax and
residual stream are float32 everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foveal.errors import PromptError
from foveal.models.layers import Factory

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DTYPE_CHOICES = ("auto", *DTYPES)
# Weights, activations and the process itself, over the bytes of the weights.
HEADROOM = 1.15


@dataclass(frozen=True, slots=True)
class Precision:
    """A resolved choice: storage type, type of rows between products, and how "auto" was decided, in one line."""

    dtype: torch.dtype
    act_dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def factory(self, device: torch.device) -> Factory:
        return Factory(self.dtype, self.act_dtype, device)


def resolve_device(name: str) -> torch.device:
    """ "auto" is a CUDA device where there is one, else the CPU. Raises PromptError for an unusable name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise PromptError(f"device {name!r} is unknown; choose auto, cpu, cuda or cuda:N")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise PromptError(
            f"device {name!r} was asked for, but torch finds no CUDA device; use cpu or auto"
        )
    return torch.device(name)


def resolve_precision(
    dtype: str, device: torch.device, *, num_parameters: int, available_bytes: int | None
) -> Precision:
    """Choose the storage type.

    "auto" is bfloat16 on GPUs, the vendor's type. On CPUs it is float32 where that fits into the free
    memory: exact, and the fastest for pictures where the CPU has no bfloat16 units; else bfloat16, which
    halves the memory.
    """
    if dtype not in DTYPE_CHOICES:
        raise PromptError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPE_CHOICES)}")
    if dtype != "auto":
        chosen, reason = DTYPES[dtype], "as asked"
    elif device.type != "cpu":
        chosen, reason = torch.bfloat16, "the checkpoint's own type"
    elif available_bytes is None or num_parameters * 4 * HEADROOM <= available_bytes:
        chosen, reason = torch.float32, "exact, and it fits into the free memory"
    else:
        chosen, reason = torch.bfloat16, "float32 weights would not fit into the free memory"
    wide = device.type == "cpu" or chosen is torch.float16
    return Precision(chosen, torch.float32 if wide else chosen, reason)
