"""Publishing to Hugging Face (a local server) makes a private repository and one commit, and uploads nothing twice."""

import json

import pytest

from stages.core.contract import StageInput
from stages.core.errors import PublishError, TransientError
from stages.kinds.publish.check import check
from tests.hub_server import Fault
from tests.published import WEIGHTS_BYTES

NAME = "owner/adder"
TO = f"hf://{NAME}"
NOWHERE = "http://127.0.0.1:9"


def uploaded_bytes(hub) -> int:
    return sum(count for name, count in hub.served_bytes.items() if name.startswith("uploaded"))


def test_a_model_becomes_one_commit_of_a_private_repository(promoted, hub):
    refresh = promoted(TO)
    result = refresh.publish()
    repository = hub.repositories[NAME]
    files = repository.files_at("main")
    judged = refresh.built["awq"].artifact / "model" / "model.safetensors"
    assert files["model.safetensors"] == judged.read_bytes()
    assert files["README.md"].decode() == refresh.card
    assert set(files) == {".gitattributes", "LICENSE", "README.md", "SHA256SUMS", "config.json", "model.safetensors"}
    assert repository.private
    assert len(repository.commits) == 2
    assert result.tags["published_revision"] == repository.refs["main"]
    assert uploaded_bytes(hub) == WEIGHTS_BYTES


def test_the_same_content_again_makes_no_commit_and_sends_nothing(promoted, hub):
    refresh = promoted(TO)
    refresh.publish()
    commit = hub.repositories[NAME].refs["main"]
    again = refresh.publish()
    assert hub.repositories[NAME].refs["main"] == commit
    assert (uploaded_bytes(hub), again.metrics["files_sent"]) == (WEIGHTS_BYTES, 0)
    assert again.tags == {"publication": "was there", "published_to": TO, "published_revision": commit}


def test_what_had_arrived_before_a_cut_is_not_sent_again(promoted, hub):
    refresh = promoted(TO)
    hub.faults = [Fault(r"/commit/main", status=503)]
    with pytest.raises(TransientError, match="what was sent is not sent again"):
        refresh.publish()
    assert uploaded_bytes(hub) == WEIGHTS_BYTES
    assert set(hub.repositories[NAME].files_at("main")) == {".gitattributes"}
    refresh.publish()
    assert uploaded_bytes(hub) == WEIGHTS_BYTES
    assert "model.safetensors" in hub.repositories[NAME].files_at("main")


def test_a_new_model_replaces_the_one_before_and_what_others_put_there_stays(promoted, hub):
    promoted(TO, adapter=True).publish()
    repository = hub.repositories[NAME]
    repository.commit({**repository.files_at("main"), "notes.txt": b"mine"})
    second = promoted(TO, number=2, mark="second")
    second.publish()
    files = repository.files_at("main")
    assert set(files) == {
        ".gitattributes",
        "LICENSE",
        "README.md",
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
        "notes.txt",
    }
    assert second.publication()["removed"] == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_hub_that_holds_something_else_afterwards_is_found_out(promoted, hub, monkeypatch):
    refresh = promoted(TO)
    repository = hub.repository(NAME)
    repository.private, repository.token = True, "hf_token_of_the_tests"
    repository.commit({})
    commit = repository.commit

    def lossy(files, **options):
        return commit({**files, "model.safetensors": files["model.safetensors"][:-1] + b"!"}, **options)

    monkeypatch.setattr(repository, "commit", lossy)
    with pytest.raises(PublishError, match=r"after all was sent, model\.safetensors there has another checksum"):
        refresh.publish()


def test_an_adapter_names_its_base_as_the_hub_does(promoted, hub):
    promoted(TO, adapter=True).publish()
    config = json.loads(hub.repositories[NAME].files_at("main")["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("owner/base", "a" * 40)


def test_a_public_repository_is_made_only_when_the_recipe_says_so(promoted, hub):
    promoted(TO, private=False).publish()
    assert not hub.repositories[NAME].private
    with pytest.raises(PublishError, match=r"everyone can read that repository.*`private: false`"):
        promoted(TO, number=2).publish()


@pytest.mark.parametrize(
    ("token", "message"),
    [(None, "needs HF_TOKEN"), ("hf_reader", "may only read"), ("hf_nobody", "answered 401.*set HF_TOKEN")],
)
def test_a_token_that_will_not_do_is_found_by_the_check(promoted, hub, monkeypatch, token, message):
    refresh = promoted(TO)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.delenv("HF_TOKEN")
    ((field, error),) = check(question(refresh))
    assert field == "to"
    assert isinstance(error, PublishError)
    with pytest.raises(PublishError, match=message):
        raise error
    assert NAME not in hub.repositories


def test_the_check_changes_nothing_and_a_hub_that_is_silent_is_no_problem_yet(promoted, hub, monkeypatch):
    refresh = promoted(TO)
    assert list(check(question(refresh))) == []
    assert NAME not in hub.repositories
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    ((field, found),) = check(question(refresh))
    assert (field, type(found)) == ("to", str)
    assert "the connection to" in found


def test_no_token_stands_in_what_is_kept(promoted, hub):
    refresh = promoted(TO)
    refresh.publish()
    kept = b"".join(path.read_bytes() for path in refresh.work.rglob("*") if path.is_file())
    assert b"hf_token" not in kept


def question(refresh) -> StageInput:
    """Return the publish stage's input for the check, before promotion, that its target can be written to."""
    planned = refresh.planned
    return StageInput(
        name="publish",
        kind="publish",
        version=planned.version,
        config=planned.config.model_dump(mode="json"),
        inputs={},
        cache=refresh.folder / "cache",
    )
