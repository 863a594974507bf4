"""The lifecycle home is `$LIFECYCLE_HOME`, else `.lifecycle` in the current folder or one above it in the project."""

import os

import pytest

from flows.ledger.home import home_above


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("LIFECYCLE_HOME", raising=False)
    for folder in (".git", "configs/tasks", "outer"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def test_commands_work_from_any_folder_of_the_project(project, monkeypatch):
    (project / ".lifecycle").mkdir()
    monkeypatch.chdir(project / "configs" / "tasks")
    assert home_above() == {"LIFECYCLE_HOME": str(project / ".lifecycle")}
    monkeypatch.chdir(project)
    assert home_above() == {}


def test_a_home_that_is_named_counts_alone(project, monkeypatch):
    (project / ".lifecycle").mkdir()
    monkeypatch.setenv("LIFECYCLE_HOME", "elsewhere")
    monkeypatch.chdir(project / "configs")
    assert home_above() == {}


def test_nothing_above_the_checkout_is_taken(project, monkeypatch):
    (project / ".lifecycle").mkdir()
    (project / "outer" / ".git").mkdir()
    monkeypatch.chdir(project / "outer")
    assert home_above() == {}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user")
def test_no_folder_of_another_user_is_taken(project, monkeypatch):
    (project / ".lifecycle").mkdir()
    os.chown(project / ".lifecycle", 65534, 65534)
    monkeypatch.chdir(project / "configs")
    assert home_above() == {}
