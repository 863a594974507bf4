"""Publishing to ModelScope (a local server) makes one commit of the files that a private repository lacks."""

import pytest

from stages.core.errors import PublishError, TransientError
from tests import modelscope_uploads, published
from tests.hub_repository import Repository
from tests.hub_server import Fault
from tests.published import WEIGHTS_BYTES
from tests.unit.stages.kinds.publish.conftest import TOKEN

NAME = "owner/adder"
TO = f"modelscope://{NAME}"
BRANCH = "master"


@pytest.fixture
def repository(hub, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Provide a private repository on the fake hub, made as its owner would make it."""
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
    made = hub.repository(NAME)
    made.private, made.token = True, TOKEN
    made.commit({".gitattributes": b"*.safetensors filter=lfs\n"}, branch=BRANCH)
    return made


def uploaded_bytes(hub) -> int:
    return sum(count for name, count in hub.served_bytes.items() if name.startswith("uploaded"))


def test_a_model_becomes_one_commit_and_is_sent_once(promoted, hub, repository):
    refresh = promoted(TO)
    first, commits = refresh.publish(), len(repository.commits)
    files = repository.files_at(BRANCH)
    judged = refresh.built["awq"].artifact / "model" / "model.safetensors"
    assert files["model.safetensors"] == judged.read_bytes()
    assert files["README.md"].decode() == refresh.card
    assert set(files) == {".gitattributes", "LICENSE", "README.md", "SHA256SUMS", "config.json", "model.safetensors"}
    assert (commits, uploaded_bytes(hub)) == (2, WEIGHTS_BYTES)

    again = refresh.publish()
    assert (len(repository.commits), uploaded_bytes(hub), again.metrics["files_sent"]) == (2, WEIGHTS_BYTES, 0)
    assert again.tags == {**first.tags, "publication": "was there"}


def test_what_had_arrived_before_a_cut_is_not_sent_again(promoted, hub, repository):
    refresh = promoted(TO)
    hub.faults = [Fault(r"^/lfs/", break_after_bytes=100), Fault(r"/commit/master", status=503)]
    with pytest.raises(TransientError, match=r"the connection to http.* failed.*what was sent is not sent again"):
        refresh.publish()
    with pytest.raises(TransientError, match=r"answered 503: .*what was sent is not sent again"):
        refresh.publish()
    assert set(repository.files_at(BRANCH)) == {".gitattributes"}
    refresh.publish()
    assert uploaded_bytes(hub) == WEIGHTS_BYTES


def test_a_new_model_replaces_the_one_before_and_what_others_put_there_stays(promoted, repository):
    promoted(TO, adapter=True).publish()
    repository.commit({**repository.files_at(BRANCH), "notes.txt": b"mine"}, branch=BRANCH)
    promoted(TO, number=2, mark="second").publish()
    files = set(repository.files_at(BRANCH))
    assert {"notes.txt", "model.safetensors"} <= files
    assert not {"adapter_config.json", "adapter_model.safetensors"} & files


def test_a_hub_that_holds_something_else_afterwards_is_found_out(promoted, repository, monkeypatch):
    commit = repository.commit

    def lossy(files, **options):
        return commit({**files, "model.safetensors": files["model.safetensors"][:-1] + b"!"}, **options)

    monkeypatch.setattr(repository, "commit", lossy)
    with pytest.raises(PublishError, match=r"after all was sent, model\.safetensors there has another checksum"):
        promoted(TO).publish()


def test_what_others_can_read_is_published_only_when_the_recipe_says_so(promoted, repository):
    repository.private = False
    with pytest.raises(PublishError, match=r"others can read that repository.*`private: false`"):
        promoted(TO).publish()
    assert promoted(TO, number=2, private=False).publish().tags["publication"] == "published"


@pytest.mark.parametrize(
    ("token", "said"), [("hf_reader", "answered 403.*set MODELSCOPE_API_TOKEN"), ("nobody", "answered 401")]
)
def test_a_token_that_will_not_do_is_named(promoted, repository, monkeypatch, token, said):
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", token)
    repository.token = token
    with pytest.raises(PublishError, match=said):
        promoted(TO).publish()


@pytest.mark.parametrize(
    ("options", "private", "licence"), [({}, True, "apache-2.0"), ({"private": False, "license": "mit"}, False, "mit")]
)
def test_a_repository_that_nobody_made_is_made_with_the_licence_of_the_card(
    promoted, hub, repository, options, private, licence
):
    del hub.repositories[NAME]
    refresh = promoted(TO, **options)
    refresh.publish()
    made = hub.repositories[NAME]
    assert made.private is private
    assert next(iter(made.commits.values()))["README.md"].decode() == licence
    assert made.files_at(BRANCH)["README.md"].decode() == refresh.card


def test_a_hub_that_makes_it_for_all_to_read_gets_nothing(promoted, hub, repository, monkeypatch):
    del hub.repositories[NAME]
    monkeypatch.setattr(modelscope_uploads, "Repository", lambda **made: Repository(**{**made, "private": False}))
    with pytest.raises(PublishError, match=r"others can read that repository"):
        promoted(TO).publish()
    assert "model.safetensors" not in hub.repositories[NAME].files_at(BRANCH)


def test_a_repository_without_a_licence_is_not_made_and_a_dry_run_sends_nothing(promoted, hub, repository, monkeypatch):
    monkeypatch.setattr(published, "BASE_CARD", "# The base\n")
    del hub.repositories[NAME]
    with pytest.raises(PublishError, match=r"there is no such repository.*a licence, which neither.*say `license`"):
        promoted(TO).publish()
    assert NAME not in hub.repositories
    hub.requests.clear()
    assert promoted(TO, number=2, dry_run=True).publish().tags["publication"] == "dry run"
    assert not hub.requests
