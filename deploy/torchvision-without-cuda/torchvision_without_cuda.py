"""Hook by which PyPI's torchvision, built for CUDA, can be imported beside a CPU build of torch.

Its compiled part cannot be loaded there, and the description of two operators of that part then ends the import, even
that of text models by Transformers. Declared, they need no kernel: image processors use none of them. PyTorch's
registry has builds of torchvision for CPUs, which load their own operators; nothing is declared beside them. A `.pth`
file imports this module when Python starts.
"""

import sys
from typing import Any


class _DeclaresOperators:
    """Finder that finds nothing, but declares torchvision's missing operators before they are described."""

    library: Any = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision._meta_registrations" or self.library:
            return
        import torch

        if not sys.modules["torchvision.extension"]._has_ops():
            self.library = torch.library.Library("torchvision", "DEF")  # its operators live as long as it does
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _DeclaresOperators())
