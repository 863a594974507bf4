"""Build step that puts recipes and pinned packages, which lie beside the code in a checkout, into the wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = ("configs", "deploy/requirements", "deploy/torchvision-without-cuda", "deploy/vllm-metadata")
"""Folders that `stages/core/shipped.py` finds in the checkout, or else in the wheel."""


class BuildWithShipped(build_py):
    """Build of the packages that also copies the shipped folders, but for pages; an editable install needs no copy."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in SHIPPED:
                leave_out = shutil.ignore_patterns("*.md", "*.png", "__pycache__", "build", "*.egg-info")
                target = Path(self.build_lib) / "stages" / "shipped" / folder
                shutil.copytree(ROOT / folder, target, ignore=leave_out, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithShipped})
