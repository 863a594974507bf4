"""Training runs as a Kubernetes Job of two pods; a stand-in for the API server runs them as local processes."""

import pytest

from tests.cluster_stages import Refresh
from tests.kubernetes_api import running_api
from tests.s3_server import BUCKET, ENVIRONMENT, running_s3
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


@pytest.mark.nightly
def test_a_pod_on_another_disk_trains_from_the_bucket_what_a_process_here_trains(tmp_path, monkeypatch):
    artifacts = make_artifacts(tmp_path / "artifacts")
    secrets = {name: f"bucket/{name}" for name in (*ENVIRONMENT, "AWS_ENDPOINT_URL")}
    away = {"image": "pipeline:1", "store_claim": None, "secrets": secrets}
    executions = {"here": {}, "away": {"launcher": "kubernetes", "kubernetes": away}}
    trained = {}
    with running_s3(monkeypatch) as bucket, running_api(tmp_path) as cluster:
        for name, execution in executions.items():
            home = tmp_path / name
            home.mkdir()
            monkeypatch.setenv("LIFECYCLE_HOME", str(home))
            if name == "away":
                (home / "store.yaml").write_text(f"store: s3://{BUCKET}/team\n")
                cluster.own_disk = home
            execution = {**execution, "checkpoint_every_steps": 2}
            trained[name] = Refresh(home, artifacts, execution, steps=4).run().artifact
        assert (cluster.objects, cluster.processes) == ({}, {})
        assert not [key for key in bucket.objects() if "/jobs/" in key]
    losses = {name: [row["loss"] for row in logged(folder)] for name, folder in trained.items()}
    assert len(losses["here"]) == 4
    assert losses["away"] == losses["here"]
    weights = {(folder / "model" / "model.safetensors").read_bytes() for folder in trained.values()}
    assert len(weights) == 1
