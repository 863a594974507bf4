"""Training runs as a Kubernetes Job of two pods; a stand-in for the API server runs them as local processes."""

from tests.cluster_stages import Refresh
from tests.kubernetes_api import running_api
from tests.train_stage import logged, make_artifacts


def test_two_pods_find_each_other_and_train_one_model(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    artifacts = make_artifacts(tmp_path / "artifacts")
    kubernetes = {"image": "pipeline:1", "job": "indexed_job"}
    with running_api(tmp_path) as cluster:
        refresh = Refresh(
            tmp_path, artifacts, {"launcher": "kubernetes", "nodes": 2, "kubernetes": kubernetes}, steps=4
        )
        built = refresh.run()
        assert cluster.objects == {}
        assert cluster.processes == {}
    losses = [row["loss"] for row in logged(built.artifact)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert (built.artifact / "model" / "model.safetensors").is_file()
