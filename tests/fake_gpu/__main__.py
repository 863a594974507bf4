"""Program that prints memory, collectives and kernels of a training step on fake GPUs, for all cases or one layout.

python -m tests.fake_gpu [MODEL ENGINE NUM_LAYERS MICRO_BATCHES FIELD=VALUE …]
"""

import sys
import tempfile
from pathlib import Path

import yaml

from tests.fake_gpu.rig import CASES, GIB, Case, Report, run


def _case(model: str, engine: str, num_layers: str, micro_batches: str, *fields: str) -> Case:
    layout = {name: yaml.safe_load(value) for name, _, value in (field.partition("=") for field in fields)}
    known = "megatron" if engine == "megatron" else "fsdp"
    return Case(model, layout, engine=known, num_layers=int(num_layers), micro_batches=int(micro_batches))


def _lines(name: str, report: Report) -> str:
    peak = f"{report.peak_bytes / GIB:.2f} GiB at the peak, the planner predicts {report.predicted_ratio:.3f} of it"
    peak += f"; its error in the bytes of collectives is {report.traffic_error:.2%} of all"
    classes = [f"{label} {size / GIB:.2f} GiB" for label, size in sorted(report.bytes_at_peak.items())]
    sent = [
        f"{kind} over {ranks} ranks: {report.calls[kind, ranks]} × , {size / GIB:.3f} GiB"
        for (kind, ranks), size in sorted(report.collectives.items())
    ]
    kernels = [f"{number} {kind}" for kind, number in sorted(report.kernels.items())]
    return "\n  ".join([f"{name}: {peak}", *(", ".join(part) for part in (classes, sent, kernels))])


if __name__ == "__main__":
    arguments = sys.argv[1:]
    for name, case in ({" ".join(arguments): _case(*arguments)} if arguments else CASES).items():
        with tempfile.TemporaryDirectory() as folder:
            print(_lines(name, run(case, Path(folder) / "model")), flush=True)
