"""Program that runs vLLM's command with an engine process forked on a CPU: `forking_program.py serve OPTION…`.

vLLM 0.32 spawns its engine for CPUs, which imports vLLM again: half of the processor time of a start, and 170 MiB.
Threads of OpenMP do not survive a fork; there are none, since the API server computes nothing before. Runs in vLLM's
environment and imports nothing of ours.
"""

import os
import sys
from typing import Any

from vllm.entrypoints.cli.main import main
from vllm.platforms.cpu import CpuPlatform

settle_config = CpuPlatform.check_and_update_config


def settle_config_and_fork(config: Any) -> None:
    """Adapt a config to CPUs as vLLM does, which also chooses how processes start, and choose `fork`."""
    settle_config(config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


if __name__ == "__main__":
    CpuPlatform.check_and_update_config = staticmethod(settle_config_and_fork)
    sys.argv[0] = "vllm"  # which begins its errors about options
    main()
