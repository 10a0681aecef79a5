"""What `import benchmarks` finds in `python benchmarks/NAME.py`: the package, from any folder and however installed.

Python puts the script's folder first on its path, where this file is. It puts the repository there instead, as
`python -m benchmarks.NAME` does, and stands for the package.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[0] = str(_HERE.parent)
__path__ = [str(_HERE)]
