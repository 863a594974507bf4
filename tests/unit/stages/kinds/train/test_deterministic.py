"""Training with deterministic kernels gives the same weights on a CPU as training without them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages.kinds.train.run import run
from tests.train_stage import make_artifacts, make_config, make_context


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.setenv(name, "")  # so that it is as before at the end
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_kernels_learn_the_same_and_others_are_refused(restored: None, tmp_path: Path) -> None:
    artifacts = make_artifacts(tmp_path)
    weights = []
    for deterministic in (False, True):
        assert not torch.are_deterministic_algorithms_enabled()
        config = make_config(steps=2, execution={"deterministic": deterministic, "measure_matmul_rate": False})
        work = tmp_path / f"deterministic-{deterministic}"
        run(config, make_context(work, artifacts, config))
        weights.append((work / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))
