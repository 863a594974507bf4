"""Publishing to an OCI registry: one layer for each file (as ORAS makes), blobs by digest, and the manifest last."""

import hashlib
import json

import pytest

from stages.core.errors import PublishError, TransientError
from tests.oci_registry import running_registry


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.delenv("OCI_USERNAME", raising=False)
    monkeypatch.delenv("OCI_PASSWORD", raising=False)
    with running_registry() as running:
        yield running


def test_each_file_is_a_layer_with_its_name_and_its_digest(promoted, registry):
    refresh = promoted(f"oci://{registry.host}/team/adder:v1")
    result = refresh.publish()
    manifest = json.loads(registry.manifests["v1"])
    layers = {one["annotations"]["org.opencontainers.image.title"]: one for one in manifest["layers"]}
    assert set(layers) == {"LICENSE", "README.md", "SHA256SUMS", "config.json", "model.safetensors"}
    weights = (refresh.built["awq"].artifact / "model" / "model.safetensors").read_bytes()
    assert registry.blobs[layers["model.safetensors"]["digest"]] == weights
    assert registry.blobs[layers["README.md"]["digest"]].decode() == refresh.card
    assert manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    digest = f"sha256:{hashlib.sha256(registry.manifests['v1']).hexdigest()}"
    assert result.tags["published_revision"] == digest
    assert registry.uploads == set()


def test_the_same_content_again_sends_nothing(promoted, registry):
    refresh = promoted(f"oci://{registry.host}/adder:v1")
    refresh.publish()
    num_received = len(registry.received)
    again = refresh.publish()
    assert (again.metrics["files_sent"], len(registry.received)) == (0, num_received)


def test_blobs_that_arrived_before_a_cut_are_not_sent_again(promoted, registry):
    refresh = promoted(f"oci://{registry.host}/adder:v1")
    registry.refused["manifest"] = 1
    with pytest.raises(TransientError, match="registry answered 503"):
        refresh.publish()
    assert registry.manifests == {}
    num_received = len(registry.received)
    refresh.publish()
    assert len(registry.received) == num_received
    assert "v1" in registry.manifests


@pytest.mark.parametrize("bearer", [False, True])
def test_credentials_come_from_the_environment(promoted, registry, monkeypatch, bearer):
    registry.credentials, registry.bearer = "ada:a-password", bearer
    refresh = promoted(f"oci://{registry.host}/adder:v1")
    with pytest.raises(PublishError, match="answered 401 to POST; set OCI_USERNAME and OCI_PASSWORD"):
        refresh.publish()
    monkeypatch.setenv("OCI_USERNAME", "ada")
    monkeypatch.setenv("OCI_PASSWORD", "a-password")
    refresh.publish()
    assert "v1" in registry.manifests
    kept = b"".join(path.read_bytes() for path in refresh.work.rglob("*") if path.is_file())
    assert b"a-password" not in kept


@pytest.mark.parametrize("bearer", [False, True])
def test_where_a_registry_has_blobs_uploaded_its_credentials_stay_unknown(promoted, registry, monkeypatch, bearer):
    monkeypatch.setenv("OCI_USERNAME", "ada")
    monkeypatch.setenv("OCI_PASSWORD", "a-password")
    registry.credentials, registry.bearer = "ada:a-password", bearer
    with running_registry() as store:
        registry.store, store.blobs, store.uploads = store, registry.blobs, registry.uploads
        promoted(f"oci://{registry.host}/adder:v1").publish()
    assert "v1" in registry.manifests
    assert len(store.received) > 1
    assert set(store.authorizations) == {""}
    assert any(registry.authorizations)


def test_where_a_registry_keeps_its_blobs_elsewhere_its_credentials_stay_unknown(promoted, registry, monkeypatch):
    monkeypatch.setenv("OCI_USERNAME", "ada")
    monkeypatch.setenv("OCI_PASSWORD", "a-password")
    registry.credentials = "ada:a-password"
    with running_registry() as lent:
        registry.lent, lent.blobs = lent, registry.blobs
        refresh = promoted(f"oci://{registry.host}/adder:v1")
        refresh.publish()
        assert refresh.publish().metrics["files_sent"] == 0
    assert set(lent.authorizations) == {""}


def test_a_blob_that_the_registry_lost_is_sent_again(promoted, registry):
    refresh = promoted(f"oci://{registry.host}/adder:v1")
    refresh.publish()
    weights = refresh.publication()["files"]["model.safetensors"]["sha256"]
    del registry.blobs[f"sha256:{weights}"]
    again = refresh.publish()
    assert again.metrics["files_sent"] == 1
    assert f"sha256:{weights}" in registry.blobs


def test_a_registry_that_does_not_answer_is_asked_another_time(promoted):
    with pytest.raises(TransientError, match="the connection failed"):
        promoted("oci://127.0.0.1:9/adder:v1").publish()
