"""Support matrix of `README.md`: which capabilities recorded test runs have proved, on a CPU and on a GPU.

make test                                                  # leaves build/test.xml, named after the commit
make nightly                                               # leaves build/nightly/PART.xml; a part may be run alone
python tests/matrix.py build/test.xml build/nightly/*.xml  # record them in tests/matrix.json; then `make docs`
python tests/matrix.py gpu.xml --card "NVIDIA H100"        # record a run of tests/gpu on a machine with this card

Cells are counts of the recorded run, so a capability whose tests failed, were skipped or did not run shows that.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

RECORD = Path(__file__).with_name("matrix.json")


@dataclass(frozen=True)
class Capability:
    """Capability of the project, shown as a row of the README's support matrix."""

    name: str
    cpu: tuple[str, ...]
    """Test files and folders that prove the capability on a CPU."""
    gpu: tuple[str, ...] = ()
    """Test files that prove the capability on a GPU."""
    not_run: str = ""
    """Description of what the capability includes but no test covers, for the README's support matrix."""


CAPABILITIES = (
    Capability(
        "whole refreshes: plan, cache, ledger, report",
        ("tests/pipeline/test_quickstart.py", "tests/pipeline/test_refresh.py", "tests/unit/flows"),
    ),
    Capability("retries; kills, full disks, cut connections", ("tests/faults", "tests/pipeline/test_retry.py")),
    Capability(
        "schedules, notifications",
        ("tests/pipeline/test_schedule.py", "tests/pipeline/test_notifications.py", "tests/unit/flows/service"),
    ),
    Capability(
        "Prefect and MLflow, local or on PostgreSQL",
        ("tests/pipeline/test_tracking.py", "tests/pipeline/test_team_servers.py", "tests/pipeline/test_team_doors.py"),
    ),
    Capability(
        "downloads, streaming: hubs, buckets, files",
        ("tests/unit/stages/hubs", "tests/unit/stages/remote", "tests/pipeline/test_hub_task.py"),
        not_run="the hubs themselves: tests use servers of their APIs",
    ),
    Capability(
        "data: formats, chat templates, packing, mixtures, curation",
        (
            *("tests/unit/stages/data", "tests/pipeline/test_mixture.py", "tests/pipeline/test_pretrain.py"),
            *("tests/unit/stages/kinds/curate", "tests/pipeline/test_curate.py"),
        ),
    ),
    Capability(
        "a store on object storage, shared by homes",
        ("tests/unit/flows/store/test_shared.py", "tests/faults/test_shared_store.py"),
        not_run="gs; S3 and Azure themselves: tests use moto and Azurite",
    ),
    Capability(
        "FSDP2: sharding, replicas, offload, recompute",
        ("tests/parity/test_fsdp.py", "tests/parity/test_slices.py", "tests/unit/stages/engines"),
        ("tests/gpu/test_training_on_gpu.py", "tests/gpu/test_kernels_on_gpu.py"),
        "NCCL",
    ),
    Capability(
        "FSDP2: TP, CP, EP",
        ("tests/parity/test_split_families.py",),
        not_run="GPUs",
    ),
    Capability(
        "Megatron-core: TP, PP, VPP, CP, EP, ETP",
        (
            "tests/parity/test_megatron_layouts.py",
            "tests/parity/test_megatron_curves.py",
            "tests/parity/test_megatron_checkpoints.py",
            "tests/parity/test_megatron_weights.py",
            "tests/pipeline/test_megatron.py",
        ),
        ("tests/gpu/test_megatron_on_gpu.py",),
        "NCCL, Transformer Engine and its image",
    ),
    Capability(
        "methods: SFT, DPO and relatives, KTO, reward, distill",
        (
            *("tests/parity/test_methods.py", "tests/pipeline/test_methods.py", "tests/pipeline/test_train.py"),
            *("tests/parity/test_pictures_equal_trl.py", "tests/pipeline/test_quickstart_vision.py"),
        ),
        ("tests/gpu/test_methods_on_gpu.py",),
        "published models that see, on a GPU",
    ),
    Capability(
        "videos and sounds: methods, merging, quantization, serving",
        (
            *("tests/unit/stages/kinds/train/test_videos.py", "tests/unit/stages/kinds/train/test_sounds.py"),
            *("tests/pipeline/test_serve_media.py", "tests/unit/stages/serving/test_media_requests.py"),
        ),
        not_run="GPUs; published models that watch or hear; other families served with videos or sounds",
    ),
    Capability(
        "GRPO with vLLM and synchronised weights",
        (
            *("tests/pipeline/test_grpo.py", "tests/pipeline/test_weight_transfer.py"),
            *("tests/unit/stages/rollouts", "tests/unit/stages/rewards"),
        ),
        not_run="sampling on GPUs of its own, weights by NCCL; vLLM's sleep on GPUs that train (a stand-in enforces "
        "memory), weights by CUDA IPC",
    ),
    Capability(
        "answers to pictures: GRPO, distill, generate",
        (
            *("tests/pipeline/test_rollout_pictures.py", "tests/unit/stages/rollouts/test_pictures.py"),
            *("tests/parity/test_pictures_equal_trl.py", "tests/unit/stages/kinds/generate"),
        ),
        not_run="GPUs",
    ),
    Capability(
        "adapters: LoRA, DoRA, QLoRA; merging",
        ("tests/parity/test_adapters.py", "tests/parity/test_adapter_dpo.py", "tests/pipeline/test_adapters.py"),
        ("tests/gpu/test_methods_on_gpu.py",),
    ),
    Capability(
        "Muon; AdamW in fewer bits",
        ("tests/parity/test_optimizers.py",),
    ),
    Capability(
        "fp8, emulated on a CPU",
        ("tests/unit/stages/engines/test_eight_bits.py",),
        ("tests/gpu/test_training_on_gpu.py",),
        "fp8 kernels of Transformer Engine",
    ),
    Capability(
        "planner: time and memory of layouts",
        ("tests/unit/stages/planner", "tests/unit/benchmarks", "tests/parity/test_predicted_memory.py"),
    ),
    Capability(
        "quantization: AWQ, GPTQ, int8, fp8; GGUF, llama.cpp",
        (
            *("tests/pipeline/test_quantize.py", "tests/pipeline/test_quantize_families.py"),
            "tests/pipeline/test_llama_cpp.py",
        ),
        not_run="fp8 served on a GPU",
    ),
    Capability(
        "vLLM: models, adapters, 4 bits",
        (
            "tests/pipeline/test_serve_evaluate.py",
            "tests/pipeline/test_serve_quantized.py",
            "tests/pipeline/test_serve_adapters.py",
        ),
        not_run="vLLM's CUDA build",
    ),
    Capability("SGLang, LMDeploy", ("tests/unit/stages/serving",), not_run="both servers; their option parsers were"),
    Capability(
        "evaluation: lm-eval, EvalScope, BFCL, judges",
        ("tests/unit/stages/kinds/evaluate", "tests/pipeline/test_serve_evaluate.py"),
    ),
    Capability(
        "metrics, alerts, traces; backup, restore",
        (
            *("tests/unit/flows/report/test_metrics.py", "tests/unit/flows/report/test_spans.py"),
            *("tests/unit/flows/service/test_backup.py", "tests/unit/deploy/test_prometheus.py"),
            "tests/nightly/test_prometheus.py",
        ),
        not_run="a Grafana, another host",
    ),
    Capability(
        "promotion: gates, paired comparison, rollback; follow, canary",
        (
            *("tests/pipeline/test_promote.py", "tests/pipeline/test_champion_again.py"),
            *("tests/unit/stages/kinds/promote", "tests/pipeline/test_follow.py", "tests/unit/flows/champion"),
        ),
    ),
    Capability(
        "publishing",
        ("tests/pipeline/test_publish.py", "tests/unit/stages/kinds/publish"),
        not_run="the hubs and registries themselves",
    ),
    Capability(
        "Slurm, Kubernetes",
        (
            *("tests/pipeline/test_slurm.py", "tests/faults/test_slurm_faults.py", "tests/unit/deploy"),
            *("tests/pipeline/test_kubernetes.py", "tests/faults/test_kubernetes_faults.py"),
        ),
        not_run="several machines, a real cluster of Kubernetes (a stand-in of its API was), CUDA's images",
    ),
    Capability("Ray", ("tests/pipeline/test_ray.py",), not_run="several machines, GPUs"),
    Capability(
        "secrets, locked servers",
        ("tests/pipeline/test_secrets.py", "tests/pipeline/test_server_doors.py"),
    ),
    Capability(
        "AMD, Ascend, Intel and Apple devices",
        ("tests/unit/stages/parallel",),
        not_run="any of them",
    ),
    Capability("energy of a refresh", (), ("tests/gpu/test_energy_on_gpu.py",)),
)


@dataclass
class Run:
    """Test run recorded for the README's support matrix: commit, date, machine, and outcomes of the tests."""

    commit: str
    date: str
    card: str | None = None
    """Name of the machine's GPU; None for a run on a CPU."""
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """Numbers of passed, skipped and failed tests in the recorded run, by test file."""

    def counts(self, paths: Iterable[str]) -> Counter[str]:
        """Return the sum of passed, skipped and failed tests of the files at or below the given paths."""
        files = [name for name in self.outcomes if any(name == path or name.startswith(f"{path}/") for path in paths)]
        return sum((self.outcomes[name] for name in files), start=Counter())


def main() -> None:
    """Record a test run, given as pytest's JUnit reports, in the README's support matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "reports",
        type=Path,
        nargs="+",
        metavar="XML",
        help="JUnit reports of pytest; their suites must be named after the tested commit, the same in all",
    )
    parser.add_argument("--card", help="name of the machine's GPU (default: none, the tests ran on a CPU)")
    arguments = parser.parse_args()
    run, *others = (read_report(report, arguments.card) for report in arguments.reports)
    for report, other in zip(arguments.reports[1:], others, strict=True):
        if other.commit != run.commit:
            sys.exit(f"reading {report}: it is of commit {other.commit}; expected {run.commit}, as the first report")
        for name, counts in other.outcomes.items():
            run.outcomes.setdefault(name, Counter()).update(counts)
    kept = [other for other in recorded() if other.card != run.card]
    RECORD.write_text(json.dumps([as_json(one) for one in [*kept, run]], indent=0, ensure_ascii=False) + "\n")
    print(f"recorded {sum(map(Counter.total, run.outcomes.values()))} tests of {run.commit[:7]}; now: make docs")


def read_report(report: Path, card: str | None) -> Run:
    """Read a test run from pytest's JUnit report (xunit1); exit unless a clean commit names its suite."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    commit = suite.get("name", "")
    if len(commit) != 40:
        sys.exit(f"reading {report}: the suite is named {commit!r}; expected a commit of 40 digits, without changes")
    run = Run(commit, suite.get("timestamp", "")[:10], card)
    for case in suite.iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        run.outcomes.setdefault(case.get("file", ""), Counter())[outcome] += 1
    return run


def recorded() -> list[Run]:
    """Return the test runs behind the support matrix: at most one on a CPU, and one for each GPU model."""
    if not RECORD.is_file():
        return []
    return [
        Run(one["commit"], one["date"], one["card"], _summed(one["outcomes"])) for one in json.loads(RECORD.read_text())
    ]


def as_json(run: Run) -> dict[str, Any]:
    """Return a run as `matrix.json` has it: a line for each test file with passed, skipped and failed tests."""
    lines = [[name, *(counts[what] for what in OUTCOMES)] for name, counts in sorted(run.outcomes.items())]
    return {"commit": run.commit, "date": run.date, "card": run.card, "outcomes": [json.dumps(line) for line in lines]}


OUTCOMES = ("passed", "skipped", "failed")


def _summed(lines: Sequence[str]) -> dict[str, Counter[str]]:
    """Add up recorded test outcomes by file. A test file that was merged from two occurs twice in the record."""
    outcomes: dict[str, Counter[str]] = {}
    for name, *numbers in map(json.loads, lines):
        outcomes.setdefault(name, Counter()).update(dict(zip(OUTCOMES, numbers, strict=True)))
    return outcomes


def table() -> str:
    """Return the README's support matrix as a Markdown table."""
    runs = recorded()
    rows = ["| capability | proved on a CPU | proved on a GPU | written, not run |", "| --- | --- | --- | --- |"]
    for one in CAPABILITIES:
        on_cpu = [_cell(run.counts(one.cpu)) for run in runs if run.card is None]
        proofs = [(run, _cell(run.counts(one.gpu))) for run in runs if run.card and run.counts(one.gpu)["passed"]]
        on_gpu = [f"{cell}, {run.card}, {run.date}" for run, cell in proofs]
        not_run = [one.not_run] if one.not_run else []
        not_run += ["GPUs"] if one.gpu and not proofs else []
        cells = (" ".join(filter(None, on_cpu)), "; ".join(on_gpu), "; ".join(not_run))
        rows.append(f"| {one.name} | {' | '.join(cell or '–' for cell in cells)} |")
    return "\n".join(rows)


def source() -> str:
    """Return a sentence that names the commits and dates of the recorded test runs."""
    cpu = [f"`{run.commit[:7]}` on {run.date}" for run in recorded() if run.card is None]
    cards = [f"{run.card} (`{run.commit[:7]}`, {run.date})" for run in recorded() if run.card]
    return f"CPU: {', '.join(cpu) or 'no run is recorded'}. GPU: {', '.join(cards) or 'no GPU has run this yet'}."


def _cell(counts: Counter[str]) -> str:
    passed = counts["passed"]
    shown = [f"{passed:,} test{'s' * (passed > 1)}"] if passed else []
    return ", ".join(shown + [f"{counts[what]:,} {what}" for what in OUTCOMES[1:] if counts[what]])


if __name__ == "__main__":
    main()
