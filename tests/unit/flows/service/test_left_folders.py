"""The worker removes working directories that a killed worker left in its folder."""

import subprocess

from flows.service.worker import remove_left_folders


def test_working_directories_of_a_killed_worker_are_removed_unless_a_refresh_goes_on_there(tmp_path):
    for name in ("tmpdeadprefect", "tmpliveprefect", "runner_storage"):
        (tmp_path / name / "below").mkdir(parents=True)
    refresh = subprocess.Popen(["sleep", "100"], cwd=tmp_path / "tmpliveprefect" / "below")
    try:
        remove_left_folders(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"tmpliveprefect", "runner_storage"}
    finally:
        refresh.kill()
        refresh.wait()
    remove_left_folders(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"runner_storage"}
