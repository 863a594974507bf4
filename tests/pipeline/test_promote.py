"""Promotions in processes of their own, with a real MLflow registry: who becomes champion, who does not, and why."""

import pytest

from flows.home import store_root
from flows.store.store import Store
from tests.promotion import NAME, own_mlflow, promote

GOOD, WORSE = [1.0] * 90 + [0.0] * 10, [1.0] * 60 + [0.0] * 40


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return own_mlflow(tmp_path_factory.mktemp("promotions"))


@pytest.fixture(autouse=True)
def store(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Store(store_root())


def test_first(store):
    built = promote(store, "first", GOOD, min_scores={"sums.exact_match": 0.8})
    print((built.artifact / "verdict.md").read_text(), built.record.tags, built.seconds)
    built = promote(store, "second", WORSE)
    print((built.artifact / "verdict.md").read_text(), built.record.tags, built.seconds)
    from flows.tracking.registry import Registry

    print(Registry().find(NAME))
