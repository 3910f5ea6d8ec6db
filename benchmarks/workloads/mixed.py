"""Mixed precision: autocast to bfloat16, on processors that have instructions for it."""

from functools import cache
from pathlib import Path

import torch


@cache
def has_bfloat16(kind: str) -> bool:
    """Tell whether bfloat16 beats float32 on this kind of device; it takes 1.5x as long on Intel without AMX."""
    cpu = Path("/proc/cpuinfo")
    is_intel = cpu.exists() and "GenuineIntel" in cpu.read_text()
    # Private functions, and some are missing before torch 2.13; there is no other that asks oneDNN.
    name = "_is_amx_tile_supported" if is_intel else "_is_avx512_bf16_supported"
    return kind != "cpu" or getattr(torch.cpu, name, bool)()


def mixed(device: torch.device, *, enabled: bool = True) -> torch.autocast:
    """Return the context for a forward pass: autocast to bfloat16, or nothing where that would only take longer."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled and has_bfloat16(device.type))


def in_place_of_bfloat16(device: torch.device) -> str:
    """Return the number format of a workload that asks for bfloat16, where it is another one; else nothing."""
    return "" if has_bfloat16(device.type) else "float32"
