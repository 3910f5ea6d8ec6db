"""Measurements that anyone can repeat; see README.md here."""

import sys
from pathlib import Path

# Examples are scripts, which import each other by their bare names.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
