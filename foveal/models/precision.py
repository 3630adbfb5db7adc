"""In which number types a model is kept and computed, and why.

Weights are kept in the chosen dtype. On CPUs rows between the big products stay float32, whatever the weights are; on
GPUs they have the weights' type, except for float16, whose range is too small for a residual stream. Norms, router,
softmax and residual stream are float32 everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foveal.errors import PromptError
from foveal.models.layers import Factory
from foveal.ops.library import half_gemm_is_fast

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DTYPE_CHOICES = ("auto", *DTYPES)


@dataclass(frozen=True, slots=True)
class Precision:
    """A resolved choice; `reason` says in one line how "auto" was decided."""

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
    """Choose the storage type; "auto" asks the machine.

    GPU: bfloat16, the vendor's type. CPU: bfloat16 where its products beat float32 (measured once), or where float32
    weights would not fit; else float32.
    """
    if dtype not in DTYPE_CHOICES:
        raise PromptError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPE_CHOICES)}")
    if dtype != "auto":
        chosen, reason = DTYPES[dtype], "as asked"
    elif device.type != "cpu":
        chosen, reason = torch.bfloat16, "the checkpoint's own type"
    elif half_gemm_is_fast(torch.bfloat16):
        chosen, reason = torch.bfloat16, "this CPU multiplies bfloat16 faster than float32"
    elif available_bytes is not None and num_parameters * 4 * 1.15 > available_bytes:
        chosen, reason = torch.bfloat16, "float32 weights would not fit in the free memory"
    else:
        chosen, reason = torch.float32, "this CPU multiplies float32 faster than bfloat16"
    wide = device.type == "cpu" or chosen is torch.float16
    return Precision(chosen, torch.float32 if wide else chosen, reason)
