# SPDX-License-Identifier: Apache-2.0
"""Makes the torchvision of this environment importable where its compiled library is not for this build of torch.

The wheels of the package index are made for CUDA, so beside a CPU build of torch their library does not load. Then
``import torchvision`` fails, because it describes two operators that do not exist, and with it fails every package that
imports torchvision where it is installed, as torchmetrics does. Video processors need none of its operators, only its
Python code. ``make install`` calls this to declare the two.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

_DECLARED = """

if not _has_ops():  # declared by tests/torchvision_on_cpu.py of lightning_mcore
    _DECLARED = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _DECLARED.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> int:
    """Return the exit status of ``import torchvision``, after declaring what its library lacks."""
    check = [sys.executable, "-c", "import torchvision"]
    if subprocess.call(check, stderr=subprocess.DEVNULL) == 0:
        return 0
    found = importlib.util.find_spec("torchvision")
    if found is None:
        return 1
    with Path(str(found.origin)).with_name("extension.py").open("a", encoding="utf-8") as file:
        file.write(_DECLARED)
    return subprocess.call(check)


if __name__ == "__main__":
    sys.exit(main())
