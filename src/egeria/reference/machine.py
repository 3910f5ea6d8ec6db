"""Which number formats are fast on the CPU of this process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

FormatName = Literal["int8-static", "int8-dynamic", "bf16", "fp32"]
Workload = Literal["convolutions", "matrix products"]

# Ascending, as oneDNN orders them; a cap allows what stands before it and itself.
_AVX512_CAPS = [f"AVX512_CORE{extension}" for extension in ("", "_VNNI", "_BF16", "_FP16", "_AMX")]
_CAPS = ["SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", *_AVX512_CAPS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The instructions for int8 and bf16 that kernels may use in this process."""

    vnni: bool = False
    """AVX-512 VNNI: sums of int8 products in 32 bits, so that activations may use all 8 bits."""
    avx512_bf16: bool = False
    """Products of bf16 vectors."""
    amx: bool = False
    """Products of int8 and bf16 matrices."""

    @classmethod
    def here(cls) -> Machine:
        """Return what this CPU has, as far as the environment variable ONEDNN_MAX_CPU_ISA allows
        its use.
        """
        return cls(
            vnni=_has("_is_vnni_supported", "avx512_vnni", "AVX512_CORE_VNNI"),
            avx512_bf16=_has("_is_avx512_bf16_supported", "avx512_bf16", "AVX512_CORE_BF16"),
            amx=_has("_is_amx_tile_supported", "amx_bf16", "AVX512_CORE_AMX"),
        )

    @property
    def fast_bf16(self) -> bool:
        """Whether bf16 beats float32.

        Measured with one thread: 3x on residual nets and 1.9x on BERT by AVX-512 BF16 alone, 4 to
        9x with AMX, and a fifth to two thirds of the speed of float32 without either.
        """
        return self.amx or self.avx512_bf16

    def fallback_order(self, workload: Workload, precision: str = "auto") -> tuple[FormatName, ...]:
        """Return the formats to try, the cheapest first, the most exact last.

        Args:
            workload: what most of the work of the model is.
            precision: the setting.
        """
        exact: tuple[FormatName, ...] = ("bf16", "fp32") if self.fast_bf16 else ("fp32",)
        if precision in ("bf16", "fp32"):
            return ("bf16", "fp32") if precision == "bf16" else ("fp32",)
        if precision == "int8-dynamic" or workload != "convolutions":
            # With AMX, bf16 outruns quantising every activation again, and is far more exact.
            return exact if self.amx and precision == "auto" else ("int8-dynamic", *exact)
        return ("int8-static", *exact)

    def __str__(self) -> str:
        names = {"AVX-512 VNNI": self.vnni, "AVX-512 BF16": self.avx512_bf16, "AMX": self.amx}
        return ", ".join(name for name, has in names.items() if has) or "neither VNNI, BF16 nor AMX"


def _has(function: str, flag: str, instructions: str) -> bool:
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").strip().upper()
    # An unknown name is no cap to oneDNN either; what comes after plain AMX includes it.
    if cap in _CAPS and _CAPS.index(cap) < _CAPS.index(instructions):
        return False
    ask = getattr(torch.cpu, function, None)  # private, and some are missing before torch 2.13
    return bool(ask()) if callable(ask) else flag in cpu_flags()


def cpu_flags() -> frozenset[str]:
    """Return the features of the processor as Linux lists them; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
