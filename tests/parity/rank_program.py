"""Program for `test_ranks.py` that prints its rank, or fails on rank 1 while the other ranks wait."""

import os
import sys
import time


def main() -> None:
    rank = os.environ.get("RANK", "alone")
    print(f"{sys.argv[1]} {rank}")
    if sys.argv[1] == "fail":
        assert rank != "1", "rank 1 has had enough"
        time.sleep(300)
