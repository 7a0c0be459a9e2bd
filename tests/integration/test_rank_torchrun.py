"""Real torchrun: the same identity before and after the process group, over a restart too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# The first start fails before it makes a process group: when it had one, gloo in the restarted
# processes now and then finds its connections refused (seen with torch 2.13).
SCRIPT = """
import json, os, sys, time
from pathlib import Path
from smdist.workers.join.enrolment import current_process
from smdist.workers.join.rank import resolve_rank

out = Path(sys.argv[1])

def tell(*found):
    facts = [[i.rank, i.world_size, i.local_rank, i.local_world_size, i.source, i.settled]
             for i in found]
    me = current_process(found[-1])
    written = out / f"{me.rank}-{me.restart}.part"
    written.write_text(json.dumps([facts, me.launch]))
    written.rename(written.with_suffix(".json"))
    return me

before = resolve_rank()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    me = tell(before)
    deadline = time.monotonic() + 60
    while not (out / f"{1 - me.rank}-0.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os._exit(1)
import torch.distributed as dist
imported = resolve_rank()
dist.init_process_group("gloo")
tell(before, imported, resolve_rank())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_identity_under_torchrun(tmp_path: Path) -> None:
    script, out = tmp_path / "job.py", tmp_path / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", str(script), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    found = {path.stem: json.loads(path.read_text()) for path in out.iterdir()}
    assert sorted(found) == ["0-0", "0-1", "1-0", "1-1"], done.stderr
    assert done.returncode == 0, done.stderr
    for name, (facts, _) in found.items():
        rank = int(name[0])
        launched = [rank, 2, rank, 2, "torchrun", True]
        later = [launched, [rank, 2, rank, 2, "torch", True]] if name.endswith("1") else []
        assert facts == [launched, *later]
    launches = {launch for _, launch in found.values()}
    assert len(launches) == 1
    assert launches.pop().split(":")[0] in ("torchelastic", "agent")
