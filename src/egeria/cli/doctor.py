"""`egeria doctor`: what this machine offers, measured where it can be."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import tempfile
import time
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import egeria
from egeria.controller import choose

PROBE_BYTES = 64 * 2**20
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the table; 1 if the directory cannot be written."""
    table = Table(title=f"egeria {egeria.__version__} on this machine", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    disk, works = _disk(arguments.directory)
    found = (
        _software()
        | _processor()
        | _evaluations()
        | _accelerator()
        | {f"disk at {arguments.directory}": disk}
    )
    for name, value in found.items():
        table.add_row(escape(name), escape(value))
    console.print(table)
    return 0 if works else 1


def _software() -> dict[str, str]:
    features = {
        "torch.compile": hasattr(torch, "compile"),
        "distributed": torch.distributed.is_available(),
        "torch.ao quantization": importlib.util.find_spec("torch.ao.quantization") is not None,
        "oneDNN": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    }
    return {
        "python, torch": f"{platform.python_version()}, {torch.__version__}",
        "torch features": ", ".join(
            f"{name} {'yes' if there else 'no'}" for name, there in features.items()
        ),
        "quantization engines": ", ".join(torch.backends.quantized.supported_engines) or "none",
    }


def _processor() -> dict[str, str]:
    waiting = os.environ.get("OMP_WAIT_POLICY", "not set")
    flags = _cpu_flags()
    found = (
        ", ".join(feature for feature in CPU_FEATURES if feature in flags)
        or "none that this system reports"
    )
    memory = psutil.virtual_memory()
    return {
        "processor": (
            f"{psutil.cpu_count(logical=False)} cores, {psutil.cpu_count()} threads; {found}"
        ),
        "threads of torch": f"{torch.get_num_threads()}; OMP_WAIT_POLICY {waiting}",
        "load now": f"{psutil.cpu_percent(interval=0.2):.0f} % of all processors",
        "memory": f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free",
    }


def _cpu_flags() -> list[str]:
    """Return the features of the processor as Linux lists them; none elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return next((line for line in text.splitlines() if line.startswith("flags")), "").split()


def _evaluations() -> dict[str, str]:
    """Return what a run would choose here."""
    choice = choose("auto", "auto", torch.nn.Linear(1, 1))
    return {
        "controller, training on the CPU": f"{choice.kind}: {choice.reason}",
    }


def _accelerator() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"accelerator": "none that torch can use"}
    free, total = torch.cuda.mem_get_info()
    return {
        "accelerator": (
            f"{torch.cuda.get_device_name()}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
    }


def _disk(directory: Path) -> tuple[str, bool]:
    """Write and read back a file of `PROBE_BYTES`; the reading may come from the page cache."""
    block = os.urandom(2**20)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            begin = time.perf_counter()
            for _ in range(PROBE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written = time.perf_counter()
            file.seek(0)
            while file.read(len(block)):
                pass
            read = time.perf_counter()
        free = psutil.disk_usage(str(directory)).free
    except OSError as error:
        return f"cannot be written: {error}", False
    rate = PROBE_BYTES / 2**20
    return (
        f"{free / 2**30:.1f} GiB free; writes {rate / (written - begin):.0f} MiB/s with fsync, "
        f"reads back {rate / (read - written):.0f} MiB/s (page cache)",
        True,
    )
