"""Checks after the simulated year of nightly refreshes, whose messages name the night, the seed and the problem."""

import json
import time
from zoneinfo import ZoneInfo

from year_nights import TIDY_EVERY, Year, expected_state, expected_text
from year_operator import NAME, ZONE, YearHome
from year_world import ClientRequest

NEW_CHAMPION_S = 120.0
"""Largest allowed time in seconds from the notification of a promotion until the new model answers."""
LONGEST_END_S = 30.0
"""Largest allowed time in seconds for the serving process to end after it is asked to."""
ANSWERED = 0.999
GROWTH = 1.1
CHAMPION_BYTES = 300_000
"""Bytes by which a lifecycle home may grow for each champion: event log, report and MLflow runs of its refresh."""
SLOWER = 1.5
COMMANDS = (["plan", "{recipe}"], ["runs"], ["show", "{refresh}"], ["report"])


def check_nights(year: Year) -> None:
    """Check that no night was skipped, every night sent a notification, and undisturbed nights ended as expected."""
    local = [night.due.astimezone(ZoneInfo(ZONE)) for night in year.nights]
    for before, after, night in zip(local, local[1:], year.nights[1:], strict=False):
        days = (after.date() - before.date()).days
        is_next = days == 1 or (days > 1 and "absence" in night.events)
        assert is_next, f"seed {year.seed}, {night.summary}: {before} was followed by {after}"
    for night in year.nights:
        assert night.notified, f"seed {year.seed}, {night.summary}: no notification came"
        was_spared = not night.kill or night.kill.at_s is None or night.kill.kind != "flow"
        if was_spared and not night.events:
            states = [notification.state for notification in night.notified]
            expected = expected_state(year.home, night.number)
            assert states == [expected], f"seed {year.seed}, {night.summary}; expected {expected}"


def check_requests(year: Year) -> None:
    """Check that nearly all requests were answered, each by the model version that was champion then."""
    asked = year.asker.asked
    kills_s = [night.kill.at_s for night in year.nights if night.kill and night.kill.at_s]

    def was_cut(request: ClientRequest) -> bool:
        """Return whether a kill or restart cut a request off; a restart answers, but resets unaccepted connections."""
        is_of_kill = any(request.began_s <= kill_s <= request.ended_s for kill_s in kills_s)
        return request.was_cut and (
            is_of_kill or any(end_s <= request.ended_s <= end_s + LONGEST_END_S for end_s in year.unit.restarts_s)
        )

    cut = [request for request in asked if was_cut(request)]
    failed = [request for request in asked if request.trouble and request not in cut]
    longest_s = max(request.ended_s - request.began_s for request in asked)
    print(f"{len(asked)} requests, {len(failed)} not answered, {len(cut)} cut, the longest took {longest_s:.1f} s")
    assert len(failed) <= (1 - ANSWERED) * len(asked), f"seed {year.seed}: {len(failed)}, the first: {failed[0]}"
    answered = [request for request in asked if not request.trouble]
    began_s = 0.0
    for life in year.lives:
        latest = 0
        # Until the services are started again, the champion of the former life may answer.
        for request in (request for request in answered if began_s + NEW_CHAMPION_S < request.began_s < life.until_s):
            assert life.versions.get(request.version) == request.text, (
                f"seed {year.seed}: not version {request.version}: {request}"
            )
            assert int(request.version) >= latest, (
                f"seed {year.seed}: version {request.version} after {latest}: {request}"
            )
            latest = int(request.version)
        began_s = life.until_s
    champion = None
    for night in year.nights:
        if "restore" in night.events:
            champion = None
        promotions = [notified for notified in night.notified if notified.state == "Promoted"]
        if promotions:
            champion = expected_text(year.home, night.number), promotions[-1].at_s
        for request in answered:
            is_of_night = night.began_s <= request.began_s < night.ended_s
            is_old = champion and request.began_s > champion[1] + NEW_CHAMPION_S and request.text != champion[0]
            assert not (is_of_night and is_old), f"seed {year.seed}, {night.summary}: no champion any more: {request}"


def check_artifacts(year: Year) -> None:
    """Check that no artifact is damaged, and each model has the weights that some night's training rows give."""
    verified = json.loads(year.home.does("verify", "--json"))
    assert not verified["damaged"], f"seed {year.seed}: {verified}"
    made = {expected_text(year.home, night.number) for night in year.nights}
    for path in year.home.folder.glob("store/train/sft-*/record.json"):
        record = json.loads(path.read_text())
        if record["recipe"] == NAME:
            sha256 = record["files"]["model/model.safetensors"]["sha256"]
            assert sha256 in made, f"seed {year.seed}: {path} is the model of no night"
    print(f"{verified['verified']} artifacts are whole")


def check_growth(year: Year) -> None:
    """Check the last quarter: Prefect's database no longer grows, other folders only by what each champion needs."""
    before, last = (year.nights[len(year.nights) * part // 4 :][: len(year.nights) // 4] for part in (2, 3))
    for folder in ("prefect", "mlflow", "ledger"):
        from_bytes, to_bytes = (max(night.sizes[folder] for night in nights) for nights in (before, last))
        most = GROWTH * from_bytes + (0 if folder == "prefect" else CHAMPION_BYTES * len(last))
        print(f"{folder}: {from_bytes / 2**20:.2f} MiB in the third quarter, {to_bytes / 2**20:.2f} MiB in the last")
        assert to_bytes <= most, f"seed {year.seed}: {folder}: {from_bytes} → {to_bytes} bytes: {last[-1].summary}"
    models = len([*year.home.folder.glob("store/train/sft-*")])
    most = len(year.lives[-1].versions) + 2 * year.keep["refreshes"] + TIDY_EVERY
    assert models <= most, f"seed {year.seed}: {models} models, where at most {most} are needed: {last[-1].summary}"


def check_against_fresh(year: Year) -> None:
    """Check that the year's lifecycle home makes the same artifacts as a new one, with hardly slower commands."""
    fresh = YearHome(year.home.folder.with_name("fresh"), year.clock)
    fresh.folder.mkdir()
    try:
        fresh.refresh()
        # Once more in both, so that all is cached in what is asked about.
        refreshes = {home: home.refresh() for home in (year.home, fresh)}
        digests = {home: digests_of(home) for home in (year.home, fresh)}
        for key, digest in digests[fresh].items():
            if not key.startswith("promote"):
                of_year = digests[year.home].get(key)
                assert of_year == digest, f"seed {year.seed}: {key} is {of_year}, undisturbed it is {digest}"
        for command in COMMANDS:
            took_s = {}
            for home, refresh in refreshes.items():
                arguments = [argument.format(recipe=home.recipe_file, refresh=refresh) for argument in command]
                took_s[home] = min(seconds_of(home, arguments) for _ in range(3))
            of_year, of_fresh = took_s.values()
            print(f"lifecycle {command[0]}: {of_year:.2f} s, in a new home {of_fresh:.2f} s")
            assert of_year <= SLOWER * of_fresh, (
                f"seed {year.seed}: {command[0]}: {of_year:.2f} s, new {of_fresh:.2f} s"
            )
    finally:
        fresh.does("down")


def digests_of(home: YearHome) -> dict[str, str]:
    """Return the content digest of each artifact in a lifecycle home, by kind, stage and version."""
    records = [json.loads(path.read_text()) for path in home.folder.glob("store/*/*/record.json")]
    return {f"{record['kind']} {record['stage']} {record['version']}": record["digest"] for record in records}


def seconds_of(home: YearHome, command: list[str]) -> float:
    began_s = time.monotonic()
    home.does(*command)
    return time.monotonic() - began_s
