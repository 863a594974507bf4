"""What must hold at the end of the year. Messages name the night, the seed, and what was found."""

import json

from year_nights import Year, expected_state, expected_text

NEW_CHAMPION_S = 60.0
"""After a promotion was told, until its model answers."""
ANSWERED = 0.999


def check_nights(year: Year) -> None:
    """Each night was told of; one that nothing happened to ended as its rows say."""
    for night in year.nights:
        assert night.told, f"seed {year.seed}, {night.said}: nobody was told"
        if not night.kill and not night.events:
            states = [one.state for one in night.told]
            expected = expected_state(year.home, night.number)
            assert states == [expected], f"seed {year.seed}, {night.said}; expected {expected}"


def check_requests(year: Year) -> None:
    """Nearly all were answered, none by a version that nobody asked for, or that was champion no more."""
    asked = year.asker.asked
    cut = [one for one in asked if one.was_cut]
    failed = [one for one in asked if one.trouble and not one.was_cut]
    longest_s = max(one.ended_s - one.began_s for one in asked)
    print(f"{len(asked)} requests, {len(failed)} not answered, {len(cut)} cut, the longest took {longest_s:.1f} s")
    kills = [night.kill for night in year.nights if night.kill and night.kill.at_s]
    for one in cut:
        assert any(one.began_s <= kill.at_s <= one.ended_s for kill in kills), f"seed {year.seed}: cut by nobody: {one}"
    assert len(failed) <= (1 - ANSWERED) * len(asked), f"seed {year.seed}: {len(failed)}, the first: {failed[0]}"
    weights = year.home.versions()
    latest = 0
    for one in asked:
        if not one.trouble:
            assert weights.get(one.version) == one.text, f"seed {year.seed}: not version {one.version}: {one}"
            assert int(one.version) >= latest, f"seed {year.seed}: version {one.version} after {latest}: {one}"
            latest = int(one.version)
    champion = None
    for night in year.nights:
        if any(told.state == "Promoted" for told in night.told):
            champion = expected_text(year.home, night.number), night.told[-1].at_s
        answers = [one for one in asked if night.began_s <= one.began_s < night.ended_s and not one.trouble]
        for one in answers:
            is_old = champion and one.began_s > champion[1] + NEW_CHAMPION_S and one.text != champion[0]
            assert not is_old, f"seed {year.seed}, {night.said}: another answered than the champion: {one}"


def check_artifacts(year: Year) -> None:
    """What is in the store is whole, and each model is the one that the rows of its night make."""
    verified = json.loads(year.home.does("verify", "--json"))
    made = {expected_text(year.home, night.number) for night in year.nights}
    models = [*year.home.folder.glob("store/train/*/record.json")]
    for path in models:
        found = json.loads(path.read_text())["files"]["model/model.safetensors"]["sha256"]
        assert found in made, f"seed {year.seed}: {path} is the model of no night"
    print(f"{len(models)} models; verified: {str(verified)[:200]}")
