import sys
from pathlib import Path

EXAMPLES = str(Path(__file__).resolve().parents[3] / "examples")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)  # examples are scripts, not a package
