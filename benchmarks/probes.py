"""What the machine can do at the moment: memory bandwidth and matrix products, with torch, in the threads given.

    python benchmarks/probes.py [--threads 2]

The roofs that `bench_vl2.py` compares with. Machines are shared and clocks vary, so roofs are measured in the same run
as the thing they are compared with, and the best of several tries counts: a roof is what can be reached.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# More than any cache: servers have up to half a gigabyte of it.
BANDWIDTH_BYTES = 3 << 29
GEMM_SIDE = 2048
# Rows (patches of a tile), inputs, outputs of the four products in a block of DeepSeek-VL2's tower.
TOWER_SHAPES = ((729, 1152, 3456), (729, 1152, 1152), (729, 1152, 4304), (729, 4304, 1152))


def timed(work: Callable[[], object], tries: int) -> list[float]:
    """Seconds of each try, after one that does not count."""
    work()
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def read_bandwidth(tries: int = 5) -> float:
    """Bytes a second that one pass over memory reaches: the sum of a large float32 tensor."""
    import torch

    x = torch.ones(BANDWIDTH_BYTES // 4)  # written, because untouched pages are no memory yet
    return BANDWIDTH_BYTES / min(timed(x.sum, tries))


def gemm_rate(dtype: torch.dtype, tries: int = 5) -> float:
    """FLOP/s of a square product of side 2,048."""
    import torch
    from torch.nn import functional as F

    a, b = (torch.randn(GEMM_SIDE, GEMM_SIDE).to(dtype) for _ in range(2))
    return float(2 * GEMM_SIDE**3 / min(timed(lambda: F.linear(a, b), tries)))


def tower_rate(tries: int = 5) -> float:
    """FLOP/s over the four products of a tower block, float32, one tile."""
    import torch
    from torch.nn import functional as F

    seconds = 0.0
    for rows, inputs, outputs in TOWER_SHAPES:
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        bias = torch.randn(outputs)
        seconds += min(timed(lambda x=x, w=weight, b=bias: F.linear(x, w, b), tries))  # type: ignore[misc]
    return sum(2 * rows * inputs * outputs for rows, inputs, outputs in TOWER_SHAPES) / seconds


def all_probes(tries: int = 5) -> dict[str, float]:
    """Bytes and FLOPs a second."""
    import torch

    return {
        "read_bytes_per_s": read_bandwidth(tries),
        "gemm_fp32_flops": gemm_rate(torch.float32, tries),
        "gemm_tower_fp32_flops": tower_rate(tries),
        "gemm_bf16_flops": gemm_rate(torch.bfloat16, tries),
    }


def probes_in_child(threads: int) -> dict[str, float]:
    """`all_probes` in a process of its own, so that nothing stays in this one's memory."""
    command = [sys.executable, __file__, "--threads", str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)["probes"]
    return found


def machine(threads: int) -> dict[str, Any]:
    """Words about the machine, for the record."""
    import torch

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    cleaned = {key.strip(): value.strip() for key, value in fields.items()}
    model, family = cleaned.get("model name", "unknown"), cleaned.get("model", "?")
    return f"{model} (model {family})"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure this machine's roofs.")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    found = {name: float(f"{value:.4g}") for name, value in all_probes().items()}
    print(json.dumps({"machine": machine(args.threads), "probes": found}))


if __name__ == "__main__":
    main()
