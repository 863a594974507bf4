"""Publishing to a folder writes the model with card, licence and checksums, and copies only changed files again."""

import hashlib
import subprocess

import pytest

from stages.core.errors import ModelError, PublishError
from stages.kinds.publish.targets.folder import Folder
from stages.kinds.publish.targets.target import LocalFile
from tests.published import RIGHT


def test_a_promoted_model_lies_there_with_card_licence_and_checksums(promoted, tmp_path):
    target = tmp_path / "shared" / "adder"
    refresh = promoted(f"file://{target}")
    result = refresh.publish()
    assert {path.name for path in target.iterdir()} == {
        "README.md",
        "LICENSE",
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
    }
    judged = refresh.built["awq"].artifact / "model"
    assert (target / "model.safetensors").read_bytes() == (judged / "model.safetensors").read_bytes()
    assert (target / "README.md").read_text() == refresh.card
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=target, check=True, capture_output=True)
    assert result.metrics["files_sent"] == result.metrics["num_files"] == 5
    assert result.tags["published_to"] == f"file://{target}"
    assert refresh.publication()["state"] == "published"


def test_the_same_content_again_sends_nothing_and_says_so(promoted, tmp_path):
    refresh = promoted(f"file://{tmp_path / 'there'}")
    refresh.publish()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "there").iterdir()}
    again = refresh.publish()
    assert (again.metrics["files_sent"], again.metrics["bytes_sent"]) == (0, 0)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "there").iterdir()} == before
    assert refresh.publication()["state"] == "was there"
    assert "nothing was sent" in refresh.said()[-1]


def test_what_is_there_by_checksum_is_not_sent_again_and_what_was_altered_is(promoted, tmp_path):
    refresh = promoted(f"file://{tmp_path / 'there'}")
    refresh.publish()
    (tmp_path / "there" / "config.json").write_text("{}")
    (tmp_path / "there" / "LICENSE").unlink()
    again = refresh.publish()
    assert again.metrics["files_sent"] == 2
    assert {name for name, file in refresh.publication()["files"].items() if file["sent"]} == {"config.json", "LICENSE"}


def test_files_of_the_model_before_go_and_those_of_others_stay(promoted, tmp_path):
    target = tmp_path / "there"
    first = promoted(f"file://{target}", adapter=True)
    first.publish()
    (target / "notes.txt").write_text("mine")
    second = promoted(f"file://{target}", number=2, mark="second")
    second.publish()
    assert second.publication()["removed"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert {path.name for path in target.iterdir()} == {
        "README.md",
        "LICENSE",
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
        "notes.txt",
    }


def test_a_dry_run_writes_the_card_and_the_list_and_sends_nothing(promoted, tmp_path):
    refresh = promoted(f"file://{tmp_path / 'there'}", dry_run=True)
    result = refresh.publish()
    assert not (tmp_path / "there").exists()
    publication = refresh.publication()
    card = hashlib.sha256(refresh.card.encode()).hexdigest()
    assert (publication["state"], publication["files"]["README.md"]["sha256"]) == ("dry run", card)
    assert publication["files"]["model.safetensors"]["size_bytes"] == 50_000
    assert (result.metrics["num_files"], result.metrics["files_sent"]) == (5, 0)


def test_a_candidate_that_is_not_promoted_is_not_published(promoted, tmp_path):
    refresh = promoted(f"file://{tmp_path / 'there'}", min_score=0.95)
    result = refresh.publish()
    assert not (tmp_path / "there").exists()
    assert result.tags["publication"] == "not promoted"
    assert refresh.said() == ["adder was not promoted: nothing is published"]


def test_the_champion_itself_is_published(promoted, tmp_path):
    refresh = promoted(f"file://{tmp_path / 'there'}", champion=RIGHT)
    assert refresh.publish().metrics["files_sent"] == 5


def test_an_artifact_that_changed_on_disk_is_refused(promoted, tmp_path):
    refresh = promoted(f"file://{tmp_path / 'there'}")
    (refresh.built["awq"].artifact / "model" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"config\.json is not what was recorded .*--force awq"):
        refresh.publish()
    assert not (tmp_path / "there").exists()


def test_a_place_that_is_a_file_is_refused_before_anything_is_written(promoted, tmp_path):
    (tmp_path / "file").write_text("here already")
    with pytest.raises(PublishError, match="no folder that can be written to"):
        promoted(f"file://{tmp_path / 'file' / 'adder'}").publish()


@pytest.mark.parametrize("planted", ["config.json", "model.safetensors"])
def test_a_planted_link_is_not_followed(promoted, tmp_path, planted):
    precious = tmp_path / "precious"
    precious.write_text("the user's")
    target = tmp_path / "there"
    target.mkdir()
    (target / f".{planted}.partial").symlink_to(precious)
    (target / planted).symlink_to(precious)
    promoted(f"file://{target}").publish()
    assert precious.read_text() == "the user's"
    assert not (target / planted).is_symlink()
    assert {path.name for path in target.glob(".*")} == set()


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path):
    outside, target = tmp_path / "outside", tmp_path / "there"
    for folder in (outside, target):
        folder.mkdir()
    (target / "sub").symlink_to(outside)
    (tmp_path / "config.json").write_text("{}")
    file = LocalFile(tmp_path / "config.json", 2, hashlib.sha256(b"{}").hexdigest())
    with pytest.raises(PublishError, match="leads out of that folder by a link"):
        Folder(target).send({"sub/config.json": file}, ["sub/config.json"], [], lambda _: None)
    assert list(outside.iterdir()) == []


def test_the_artifacts_of_the_store_are_not_overwritten(promoted, tmp_path):
    """Publishing into the artifact store is refused, even if a cluster's store has another path than the planner's."""
    champion = tmp_path / "refresh-1" / "store" / "quantize"
    refresh = promoted(f"file://{champion}/awq-0123456789ab/model")
    with pytest.raises(PublishError, match="lies in the store"):
        refresh.publish()
    assert [path.name for path in champion.iterdir()] == [refresh.built["awq"].artifact.name]
