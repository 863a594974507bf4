"""Publishing to object storage sends only new files and removes outdated ones, tested with a real S3 server."""

import boto3
import pytest

from stages.core.errors import PublishError
from tests.s3_server import BUCKET, running_s3

TO = f"s3://{BUCKET}/models/adder"


@pytest.fixture
def storage(monkeypatch):
    with running_s3(monkeypatch) as server:
        yield server


def objects(server) -> dict[str, bytes]:
    """Return the content of each published object by name, without prefix, as another S3 client sees it."""
    client = boto3.client("s3", endpoint_url=server.url, region_name="us-east-1")
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix="models/adder/").get("Contents", [])
    keys = [one["Key"] for one in listed if not one["Key"].endswith("/")]
    return {key[13:]: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


def test_a_model_lies_below_its_prefix_with_card_and_checksums(promoted, storage):
    refresh = promoted(TO)
    result = refresh.publish()
    found = objects(storage)
    assert set(found) == {"LICENSE", "README.md", "SHA256SUMS", "config.json", "model.safetensors"}
    judged = refresh.built["awq"].artifact / "model" / "model.safetensors"
    assert found["model.safetensors"] == judged.read_bytes()
    assert found["README.md"].decode() == refresh.card
    assert result.metrics["files_sent"] == 5


def test_only_what_is_not_there_is_sent(promoted, storage):
    refresh = promoted(TO)
    refresh.publish()
    assert refresh.publish().metrics["files_sent"] == 0
    storage.put({"models/adder/config.json": b'{"model_type": "QWEN3"}'})
    assert refresh.publish().metrics["files_sent"] == 1
    assert objects(storage)["config.json"] == b'{"model_type": "qwen3"}'


def test_files_of_the_model_before_go_and_those_of_others_stay(promoted, storage):
    promoted(TO, adapter=True).publish()
    storage.put({"models/adder/notes.txt": b"mine", "models/adder-2/README.md": b"another"})
    second = promoted(TO, number=2, mark="second")
    second.publish()
    assert second.publication()["removed"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert set(objects(storage)) == {
        "LICENSE",
        "README.md",
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
        "notes.txt",
    }


def test_credentials_that_are_not_accepted_are_found_before_anything_is_sent(promoted, storage):
    refresh = promoted(TO)
    storage.admit_nobody()
    with pytest.raises(PublishError, match=r"AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY\) are not accepted"):
        refresh.publish()
    storage.admit_all()
    assert objects(storage) == {}


def test_a_bucket_that_is_not_there_is_named(promoted, storage):
    with pytest.raises(PublishError, match="there is no bucket nowhere"):
        promoted("s3://nowhere/adder").publish()
