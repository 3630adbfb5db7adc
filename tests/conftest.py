"""What all tests share: where golden data is, and global state put back as it was.

Torch gets one thread: the models of the tests are so small that a second one costs more than it brings (the golden
cases take half the CPU time, and a tenth of the time where other programs use the cores). Golden data lies beside the
checkout in `../shared/golden`, or where FOVEAL_GOLDEN says; tests that need it are skipped, loudly, where it is not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_THREADS = 1

# A deadline would measure the machine's load, not the code. In CI the same examples are drawn each time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

torch.set_num_threads(NUM_THREADS)


def golden_folder() -> Path:
    """Where golden data should be, whether or not it is there."""
    return Path(os.environ.get("FOVEAL_GOLDEN") or REPOSITORY.parent / "shared" / "golden")


def pytest_report_header() -> str:
    folder = golden_folder()
    state = "found" if (folder / "vl2").is_dir() else "NOT FOUND, its tests are skipped"
    return f"golden data: {folder} ({state}); set FOVEAL_GOLDEN to change"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of all golden data."""
    folder = golden_folder()
    if not folder.is_dir():
        pytest.skip(f"no golden data in {folder}; set FOVEAL_GOLDEN to the folder that holds vl2/")
    return folder


@pytest.fixture(scope="session")
def golden_vl2(golden: Path) -> Path:
    """The folder of DeepSeek-VL2's golden data: one folder a variant, `images/` beside them."""
    folder = golden / "vl2"
    if not folder.is_dir():
        pytest.skip(f"no DeepSeek-VL2 golden data in {folder}; set FOVEAL_GOLDEN")
    return folder


@pytest.fixture(autouse=True)
def _global_state_is_put_back() -> Iterator[None]:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_default_dtype(dtype)
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [
        r for r in terminalreporter.getreports("skipped") if "golden data" in str(r.longrepr)
    ]
    if skipped:
        terminalreporter.write_sep(
            "!", f"{len(skipped)} tests had no golden data and were skipped", red=True
        )
