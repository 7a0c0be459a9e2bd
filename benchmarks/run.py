"""What capture costs: runs every measurement and prints one table. `make bench [QUICK=1]`.

All options: python benchmarks/run.py --help
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    sys.exit(subprocess.call([sys.executable, "-m", "benchmarks", *sys.argv[1:]], cwd=root))
