"""From safetensors files into tensors that exist already.

    Checkpoint.open(folder)   headers only: which tensor lies where
    load_parameters(...)      checks the whole name table, then reads

Bytes go from the file straight into the parameter's memory where dtype and device agree, else through small pieces
that are converted; matrices that are stored as codes and scales become numbers on the way (see `quant`). Nothing is
mapped into memory and no tensor is held twice, so the peak is the weights plus a few pieces. Weights that are stored as
pickles are refused: unpickling runs code of the file's choosing.

This module knows no model: names, shapes and places come as `ParameterSpec`s.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import local
from typing import TypeAlias

import torch

from foveal.errors import CheckpointError
from foveal.models import quant
from foveal.models.config import read_json
from foveal.models.names import IGNORED_PREFIXES, IGNORED_SUFFIXES, ParameterSpec, Source
from foveal.models.safetensors_header import TensorInfo, read_header
from foveal.ops.packed import PackedWeight, Packing

Progress = Callable[[int, int], None]
# A parameter of numbers, or a weight that keeps the file's codes.
Destination: TypeAlias = torch.Tensor | PackedWeight

Spelling: TypeAlias = Callable[[Mapping[str, TensorInfo]], Mapping[str, TensorInfo]]

# Stored dtypes that become parameters by a conversion.
READABLE_DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
# Stored dtypes of tables of whole numbers.
WHOLE_DTYPES: Mapping[str, torch.dtype] = {"I64": torch.int64, "I32": torch.int32}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
MIN_PIECE_BYTES = 1 << 20
MAX_PIECE_BYTES = 32 << 20
NUM_READERS = 2  # measured: see benchmarks/README.md
LISTED = 20  # names shown of each kind in one error


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a model folder by name. Holds no numbers and no open file."""

    folder: Path
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, folder: Path, *, spelling: Spelling | None = None) -> Checkpoint:
        """Read the headers of all weight files in `folder`.

        With an index (`*.safetensors.index.json`) its files are read, else every `*.safetensors`. The folder's name is
        never looked at. `spelling` turns the names of the files into those of the name table. Raises CheckpointError:
        no weights, pickled weights only, missing, truncated or corrupt files.
        """
        index = _find_index(folder)
        paths = _indexed_files(folder, index) if index else _all_files(folder)
        tensors: dict[str, TensorInfo] = {}
        for path in paths:
            for name, info in read_header(path).items():
                if name in tensors:
                    raise CheckpointError(
                        f"{folder}: tensor {name!r} is in {tensors[name].path.name} and in {path.name}; "
                        "keep the files of one model in a folder"
                    )
                tensors[name] = info
        return cls(folder, tensors if spelling is None else spelling(tensors))

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())


def _find_index(folder: Path) -> Path | None:
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{folder} has {len(found)} weight indexes ({names}); keep one")
    return found[0] if found else None


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    names = sorted(set(read_index(index).values()))
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{index}: file {name!r} lies outside the model's folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files that {index.name} names: "
            f"{_listed(missing)}; download or copy them again"
        )
    return [folder / name for name in names]


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, from a `*.safetensors.index.json`."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(
            f"{path} has no 'weight_map' of tensor to file name; download it again"
        )
    return weight_map


def _all_files(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if found:
        return found
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickled:
        raise CheckpointError(
            f"{folder} has its weights as pickles only ({_listed(pickled)}), which can run code when they are read; "
            "only safetensors files are loaded. Convert them once, in an environment you trust: "
            "torch.load(file, weights_only=True), then safetensors.torch.save_file(weights, 'model.safetensors')"
        )
    raise CheckpointError(
        f"{folder} has no *.safetensors file; download the model's weights into it"
    )


def is_leftover(name: str) -> bool:
    """True for tensors that vendor checkpoints carry and no model uses; they are never read."""
    return name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIXES)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


@dataclass(slots=True)
class _Mismatch:
    """Everything that is wrong between the name table and a checkpoint, said in one error."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def add(self, kind: str, name: str) -> None:
        names: list[str] = getattr(self, kind)
        names.append(name)

    def raise_if_any(self, folder: Path) -> None:
        parts = (
            ("missing", self.missing),
            ("extra", self.extra),
            ("misshapen", self.misshapen),
            ("of a dtype that cannot be read", self.unreadable),
        )
        said = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in parts if names]
        if said:
            raise CheckpointError(
                f"the tensors in {folder} do not fit its config.json. {'. '.join(said)}. "
                "Check that config.json and the weights come from the same model"
            )


def check_tensors(
    specs: Sequence[ParameterSpec],
    checkpoint: Checkpoint,
    ignored: Callable[[str], bool] = is_leftover,
    packed: Mapping[str, Packing] | None = None,
) -> None:
    """Compare names, shapes and dtypes of a checkpoint with the name table.

    `packed` says which parameters keep codes, and of which kind. Raises one CheckpointError that lists all missing,
    extra, misshapen and unreadable tensors (the first 20 of each).
    """
    found = _Mismatch()
    known: set[str] = set()
    for spec in specs:
        wanted = (packed or {}).get(spec.name)
        for source in spec.sources:
            known.add(source.name)
            info = checkpoint.tensors.get(source.name)
            if info is not None and quant.is_coded(source, info):
                known.add(quant.scale_name(source.name))
                for problem in quant.find_problems(source, checkpoint.tensors, wanted):
                    found.add(*problem)
            else:
                _check_plain(spec, source, info, wanted, found)
    extra = (name for name in checkpoint.tensors if name not in known and not ignored(name))
    found.extra.extend(sorted(extra))
    found.raise_if_any(checkpoint.folder)


def _check_plain(
    spec: ParameterSpec,
    source: Source,
    info: TensorInfo | None,
    wanted: Packing | None,
    found: _Mismatch,
) -> None:
    readable = readable_dtypes(spec)
    if info is None:
        found.add("missing", source.name)
    elif info.shape != source.shape:
        expected = f"expected {list(source.shape)}, found {list(info.shape)}"
        found.add("misshapen", f"{source.name} ({expected})")
    elif info.dtype not in readable:
        found.add("unreadable", f"{source.name} ({info.dtype}; readable: {', '.join(readable)})")
    elif wanted is not None:
        found.add("unreadable", f"{source.name} ({info.dtype}; kept packed as {wanted.format})")


def readable_dtypes(spec: ParameterSpec) -> Mapping[str, torch.dtype]:
    """The stored dtypes that can fill a parameter by a conversion."""
    return WHOLE_DTYPES if spec.dtype == "int64" else READABLE_DTYPES


@dataclass(frozen=True, slots=True)
class _Read:
    """One contiguous run of bytes of a file and the flat piece of a parameter that it fills."""

    path: Path
    start: int
    num_bytes: int
    dtype: torch.dtype
    target: torch.Tensor

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load read, and the names of the tensors that it knew and set aside."""

    num_tensors: int
    num_bytes: int
    set_aside: tuple[str, ...] = ()


def load_parameters(
    specs: Sequence[ParameterSpec],
    checkpoint: Checkpoint,
    destinations: Mapping[str, Destination],
    progress: Progress | None = None,
    *,
    ignored: Callable[[str], bool] = is_leftover,
    num_readers: int = NUM_READERS,
) -> LoadReport:
    """Fill `destinations` (by parameter name, contiguous, of the specs' shapes, any float dtype) from `checkpoint`.

    Packed destinations take codes and scales as they are stored. `progress(bytes_done, bytes_total)` counts bytes of
    the file and is called in the caller's thread. Tensors for which `ignored(name)` holds are not read. Raises
    CheckpointError before a byte is read if the tables do not agree, and for a file that changed or ends early while it
    is read. Numbers are converted with torch's rounding to nearest even.
    """
    packed = {n: d.packing for n, d in destinations.items() if isinstance(d, PackedWeight)}
    check_tensors(specs, checkpoint, ignored, packed)
    piece_bytes = max(MIN_PIECE_BYTES, min(MAX_PIECE_BYTES, checkpoint.num_bytes // 64))
    reads = list(_plan_reads(specs, checkpoint, destinations, piece_bytes))
    reads.sort(key=lambda read: (read.path, read.start))
    total, done = sum(read.num_bytes for read in reads), 0
    if progress is not None:
        progress(0, total)
    with ExitStack() as stack:
        paths = dict.fromkeys(path for read in reads for path in read.paths)
        files = {path: _open(path, stack) for path in paths}
        reader = _Reader(files, piece_bytes)
        pool = ThreadPoolExecutor(num_readers, "foveal-load")
        stack.callback(
            pool.shutdown, cancel_futures=True
        )  # an error or interrupt drops what is left
        for future in as_completed([pool.submit(reader.run, read) for read in reads]):
            done += future.result()
            if progress is not None:
                progress(done, total)
    set_aside = tuple(name for name in checkpoint.tensors if ignored(name))
    return LoadReport(len(checkpoint.tensors) - len(set_aside), total, set_aside)


def _open(path: Path, stack: ExitStack) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    stack.callback(os.close, descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return descriptor


def _plan_reads(
    specs: Sequence[ParameterSpec],
    checkpoint: Checkpoint,
    destinations: Mapping[str, Destination],
    piece_bytes: int,
) -> Iterator[_Read | quant.Band]:
    for spec in specs:
        parameter = destinations[spec.name]
        assert tuple(parameter.shape) == spec.shape, (
            f"{spec.name}: {tuple(parameter.shape)} != {spec.shape}"
        )
        for source in spec.sources:
            info = checkpoint.tensors[source.name]
            if quant.is_coded(source, info):
                yield from quant.plan_bands(source, checkpoint.tensors, parameter, piece_bytes)
                continue
            assert isinstance(parameter, torch.Tensor), f"{spec.name} was checked to be plain"
            assert parameter.is_contiguous(), f"{spec.name} is not contiguous"
            dtype = readable_dtypes(spec)[info.dtype]
            yield from _plan_plain(info, dtype, _target(parameter.detach(), source), piece_bytes)


def _plan_plain(
    info: TensorInfo, dtype: torch.dtype, target: torch.Tensor, piece_bytes: int
) -> Iterator[_Read]:
    step = piece_bytes // dtype.itemsize
    for first in range(0, info.num_elements, step):
        piece = target[first : first + step]
        start, size = info.start + first * dtype.itemsize, piece.numel() * dtype.itemsize
        yield _Read(info.path, start, size, dtype, piece)


def _target(parameter: torch.Tensor, source: Source) -> torch.Tensor:
    """The flat run of `parameter` that `source` fills."""
    base = parameter if source.index is None else parameter[source.index]
    first = source.offset * math.prod(base.shape[1:])
    return base.reshape(-1)[first : first + math.prod(source.shape)]


class _Reader:
    """Carries out reads; one object serves all threads of a load."""

    def __init__(self, files: Mapping[Path, int], piece_bytes: int) -> None:
        self._files = files
        self._piece_bytes = piece_bytes
        self._of_thread = local()

    def run(self, read: _Read | quant.Band) -> int:
        """Read one piece; returns its bytes."""
        if isinstance(read, quant.Band):
            return read.run(self._fill)
        target = read.target
        if target.dtype == read.dtype and target.device.type == "cpu":
            self._fill(read.path, read.start, memoryview(target.view(torch.uint8).numpy().data))
            return read.num_bytes
        buffer = self._buffer()
        self._fill(read.path, read.start, memoryview(buffer)[: read.num_bytes])
        target.copy_(torch.frombuffer(buffer, dtype=read.dtype, count=target.numel()))
        return read.num_bytes

    def _buffer(self) -> bytearray:
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = bytearray(self._piece_bytes)
        buffer: bytearray = self._of_thread.buffer
        return buffer

    def _fill(self, path: Path, start: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            try:
                got = os.preadv(self._files[path], [memory[done:]], start + done)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
            if got == 0:
                raise CheckpointError(
                    f"{path} is truncated: it ends at byte {start + done} while it is read; "
                    "download or copy the file again"
                )
            done += got
