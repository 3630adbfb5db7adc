"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def available_bytes() -> int | None:
    """Free memory in bytes within a control group's limit, page cache counted as free; None if unknown."""
    found = [value for value in (_meminfo("MemAvailable"), _cgroup_room()) if value is not None]
    return min(found) if found else None


def total_bytes() -> int | None:
    """Memory of the machine in bytes; None where it cannot be told."""
    return _meminfo("MemTotal")


def _meminfo(key: str) -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    return None


def _cgroup_room() -> int | None:
    """What the control group leaves, its reclaimable page cache counted as free."""
    for folder, limit, usage in (
        (_CGROUP_V2, "memory.max", "memory.current"),
        (_CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None:
            return max(0, most - used + _inactive_file(folder))
    return None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


def _inactive_file(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
