"""An adapter without effect: what it is put on answers as its base does, where a server cannot be asked for that.

vLLM answers requests to a base wrongly once every slot has an adapter (`stages/serving/vllm/adapters.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from stages.adapters.headers import CONFIG_FILE, WEIGHTS_FILE
from stages.models.weight_files import read_tensors


def write_idle_adapter(source: Path, folder: Path) -> None:
    """Into `folder`: the adapter in `source` with 0 for every B. Raises ModelError for damaged files."""
    tensors = read_tensors(source / WEIGHTS_FILE)
    folder.mkdir(parents=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        shutil.copyfile(source / name, folder / name)
    with (folder / WEIGHTS_FILE).open("r+b") as file:
        for tensor in tensors:
            if ".lora_B." in tensor.name:
                file.seek(tensor.start)
                file.write(bytes(tensor.end - tensor.start))
