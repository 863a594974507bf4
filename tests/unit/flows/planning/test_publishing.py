"""A plan fails if it will publish to a hub that needs a token, and no token is set."""

import pytest

from flows.planning.checks import check_publishing
from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.store.record import Index
from stages.core.errors import RecipeError
from tests.published import recipe_tree


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)


def planned(tmp_path, to="hf://owner/adder", **publish):
    recipe = load_stages("tiny", tmp_path, recipe_tree(to, **publish))
    return plan(recipe, {name: {} for name in recipe.stages}, Index(()))


def test_a_hub_without_its_token_is_refused_by_name(tmp_path):
    with pytest.raises(RecipeError, match=r"stages\.publish\.to: hf://owner/adder .* has no HF_TOKEN; set it"):
        check_publishing(planned(tmp_path))


@pytest.mark.parametrize(
    "fields",
    [
        {"dry_run": True},
        {"to": "file:///srv/models/adder"},
        {"execution": {"launcher": "kubernetes", "kubernetes": {"image": "pipeline"}}},
    ],
)
def test_what_needs_no_token_here_is_planned(tmp_path, fields):
    check_publishing(planned(tmp_path, **fields))


def test_with_the_token_it_is_planned(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    check_publishing(planned(tmp_path))


@pytest.mark.parametrize(
    "to",
    [
        *(
            "hf://owner",
            "hf://owner/name/more",
            "s4://bucket/x",
            "owner/name",
            "file://",
            "file:///a\0b",
            "file:///a\nb",
        ),
        *("hf://../name", "modelscope://owner/..", "s3://bucket/../x", "oci://host:٣/adder:v1"),
    ],
)
def test_an_address_that_is_none_is_refused_with_what_is_allowed(tmp_path, to):
    with pytest.raises(RecipeError, match=r"stages\.publish\.to: .*is no place to publish to; write hf://owner/name"):
        planned(tmp_path, to=to)


def test_private_of_what_is_no_hub_does_nothing(tmp_path):
    config = planned(tmp_path, to="file:///srv/models/adder", private=False).stages["publish"].config
    assert dict(config.idle_fields())["private"].startswith("who may read file:///srv/models/adder")


@pytest.mark.parametrize("port", ["0", "99999", "65536", "1" * 5000])
def test_a_port_that_is_none_is_refused(tmp_path, port):
    with pytest.raises(RecipeError, match=r"stages\.publish\.to: .*a port is 1 to 65535"):
        planned(tmp_path, to=f"oci://host:{port}/adder:v1")
    planned(tmp_path, to="oci://host:65535/adder:v1")


@pytest.mark.parametrize("place", ["/etc/passwd", "/etc/passwd/adder", "/dev/null", "{tmp}/file", "{tmp}/" + "x" * 300])
def test_a_place_that_is_no_folder_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("here already")
    to = f"file://{place.format(tmp=tmp_path)}"
    with pytest.raises(RecipeError, match=r"stages\.publish\.to: publishing to file:///"):
        check_publishing(planned(tmp_path, to=to))
    check_publishing(
        planned(tmp_path, to=to, execution={"launcher": "kubernetes", "kubernetes": {"image": "pipeline"}})
    )


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        "{home}/store",
        "{home}/store/train/sft-0123456789ab/model",
        "{home}/store/new/folder",
        "{home}/other/../store/x",
        "{link}/train",
        "{link}",
        "{home}",
    ],
)
def test_a_folder_of_the_store_is_refused(tmp_path, monkeypatch, place, dry_run):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "store" / "train" / "sft-0123456789ab").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "home" / "store")
    to = f"file://{place.format(home=tmp_path / 'home', link=tmp_path / 'link')}"
    with pytest.raises(RecipeError, match=r"stages\.publish\.to: .*that folder (lies in|holds) the store"):
        check_publishing(planned(tmp_path, to=to, dry_run=dry_run))
    check_publishing(planned(tmp_path, to=f"file://{tmp_path}/home-of-models/store"))
