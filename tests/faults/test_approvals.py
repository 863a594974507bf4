"""Promotions that a person must approve: nothing happens without it, and what a kill cuts short is completed once."""

import asyncio
import grp
import os
import pwd
import shutil

import httpx
import pytest
from click.testing import CliRunner
from fastapi import FastAPI
from mlflow import MlflowClient

from flows.champion import approvals
from flows.champion.registry import CHALLENGER, CHAMPION, PREVIOUS
from flows.cli.main import cli
from flows.ledger.events import AttemptBegan, AttemptEnded, RefreshEnded
from flows.ledger.people import Person
from flows.ledger.refreshes import REPORT_FILE, ledger_of
from flows.running.refresh import final_state
from flows.running.runner import run_stage
from flows.servers.keyed import read_named_key
from flows.service.approval_door import PROXY_KEY_VARIABLE, add_approvals
from flows.store.collect import find_garbage, verify
from flows.store.content import is_pending
from stages.core.approval import AWAITED, read_approval, read_result
from stages.core.errors import ApprovalError, LifecycleError
from stages.kinds.promote.verdict import read_verdict
from stages.kinds.publish.records import read_promoted
from tests.beginnings import beginning
from tests.faults.test_promote_faults import BETTER, GOOD, become_champion
from tests.faults.tiny import Notes
from tests.promotion import NAME, offer, promote

ANNA, BEN = Person("anna", frozenset({"release"})), Person("ben", frozenset({"staff"}))
ASKED = {"by": ["release", "leads"], "within_hours": 1}
WHY = "its answers were read"
pytestmark = pytest.mark.timeout(600)


def offered(store, mark="candidate", answers=BETTER, approval=ASKED, bound=None):
    """Run the promotion of a candidate that must be approved; return it as built. bound: of a regression."""
    return promote(store, mark, answers, approval=approval, max_regression_standard_errors=bound)


def decided(*arguments):
    return read_verdict(approvals.decide(*arguments))


def refresh_that_waits(built, refresh="nightly-1"):
    """Write the ledger of a refresh that ended with this promotion, as its run would; return the ledger."""
    ledger, folder = ledger_of(refresh), built.artifact
    work = {"stage": "promote", "number": 1}
    tags = read_result(folder).tags
    for event in (
        beginning(folder, {"promote": "promote", "publish": "publish"}, refresh),
        AttemptBegan(**work, work=folder, first_byte=0, params={}, tags={"kind": "promote", "version": built.version}),
        AttemptEnded(**work, outcome="finished", folder=folder, last_byte=0, tags=tags),
        RefreshEnded(state="waiting_for_approval", seconds=2.0),
    ):
        ledger.append(event)
    return ledger


def number_of(registry, alias=CHAMPION):
    found = registry.find(NAME, alias)
    return found.number if found else None


def test_a_candidate_that_keeps_all_gates_waits_and_is_promoted_once_somebody_approves_it(store, registry, fault):
    fault.name, fault.stage = "a promotion waits for approval", "promote"
    become_champion(registry, "former")
    built = offered(store)
    assert is_pending(built.artifact) and (number_of(registry), registry.approvers(NAME)) == ("1", ())
    ledger = refresh_that_waits(built)
    state = final_state(ledger.read())
    assert (state.name, state.type.value) == ("WaitingForApproval", "CANCELLED")
    assert f"{NAME}: {AWAITED}; version {built.version} waits for approval by release or leads until" in state.message
    assert offered(store).state == "built" and number_of(registry) == "1", "the next night changes nothing"
    assert built.artifact not in {one.path for one in find_garbage(store, older_than_days=0)}

    for name, version, person, said in (
        (NAME, None, ANNA, "say which version of adder is meant: version "),
        (NAME, "0123456789ab", ANNA, "no promotion of adder in the store has the version"),
        ("other", built.version, ANNA, "nothing of other waits for approval"),
        (NAME, built.version, BEN, "ben may not decide, expected a member of release or leads; this machine has no gr"),
    ):
        with pytest.raises(ApprovalError, match=said):
            decided(name, version, "approved", person, WHY)
    with pytest.raises(ApprovalError, match="the reason has 0 characters"):
        decided(NAME, built.version, "approved", ANNA, " \n ")
    assert number_of(registry) == "1"

    verdict = decided(NAME, built.version, "approved", ANNA, f" {WHY}\n")
    assert (verdict.outcome, number_of(registry), number_of(registry, PREVIOUS)) == ("promoted", "2", "1")
    assert registry.approvers(NAME) == ("release", "leads")
    approval = MlflowClient().get_model_version(NAME, "2").tags["lifecycle.approval"]
    assert approval.startswith("was approved by anna on 20") and approval.endswith(f" UTC: {WHY}")
    record = ledger.read()
    assert (record.state, record.stages["promote"].verdict) == ("completed", "promoted")
    assert f"; it {approval}" in (ledger.folder / REPORT_FILE).read_text()
    assert all(one.whole for one in verify(store))
    assert offered(store).state == "cached"
    folders = {name: one.folder for name, one in ((one.record.stage, one) for one in store.index().artifacts)}
    assert read_promoted(folders, "promote").approval == approval
    with pytest.raises(ApprovalError, match=r"was approved by anna on .*; to change that, judge it again"):
        decided(NAME, built.version, "approved", BEN, WHY)


def door(tmp_path, monkeypatch, key="k" * 40):
    """Open the worker's door for approvals; return a function that asks there as a signing-in proxy does."""
    (file := tmp_path / "proxy.key").write_text(f"lifecycle:{key}\n")
    file.chmod(0o600)
    monkeypatch.setenv(PROXY_KEY_VARIABLE, str(file))
    application = FastAPI()
    add_approvals(application, read_named_key(PROXY_KEY_VARIABLE))

    def ask(method="POST", user="anna", groups="staff,release", key=key, **request):
        names = [user] if isinstance(user, str) else user
        headers = [("X-Forwarded-Groups", groups), *(("X-Forwarded-User", name) for name in names)]
        path = "/approvals" if method == "GET" else f"/approvals/{NAME}"
        return asked(application, method, path, headers=headers, auth=key and ("lifecycle", key), **request)

    return ask


def asked(application, method, path, **request):
    async def answer():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://worker") as client:
            return await client.request(method, path, **request)

    return asyncio.run(answer())


def test_a_door_for_the_signing_in_proxy_believes_no_one_else(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    decision = {"decision": "approved", "why": WHY}
    ask = door(tmp_path, monkeypatch)
    for wrong in (None, "k", "K" * 40):
        assert ask("GET", key=wrong).status_code == ask(key=wrong, json=decision).status_code == 401
    for user in ([], ["anna", "ben"], "", "a" * 201):
        refused = ask(user=user, json=decision)
        assert (refused.status_code, "expected one name in x-forwarded-user" in refused.text) == (403, True)
    assert ask(data=decision).status_code == 415, "a form of another site"
    for field in ({"decision": "maybe"}, {"why": None}, {"by": "ben"}, {"why": "x" * 20_000}):
        assert ask(json={**decision, **field}).status_code == 422
    closed = FastAPI()
    add_approvals(closed, None)
    assert asked(closed, "GET", "/approvals").status_code == 404, "there is no door without a key"


@pytest.mark.nightly
def test_a_member_of_the_group_by_the_words_of_the_proxy_approves_over_http(store, registry, tmp_path, monkeypatch):
    become_champion(registry, "former")
    built = offered(store)
    decision = {"version": built.version, "decision": "approved", "why": WHY}
    ask = door(tmp_path, monkeypatch)
    (waits,) = ask("GET").json()
    assert (waits["name"], waits["version"], waits["groups"]) == (NAME, built.version, ["release", "leads"])
    refused = ask(user="ben", groups="staff", json=decision)
    assert (refused.status_code, number_of(registry)) == (403, "1")
    assert "ben may not decide, expected a member of release or leads" in refused.text
    approved = ask(json=decision)
    assert (approved.status_code, number_of(registry)) == (200, "2"), approved.text
    assert "was approved by anna on 20" in approved.text
    assert ask("GET").json() == []
    again = ask(json=decision)
    assert (again.status_code, "to change that, judge it again" in again.text) == (403, True)


@pytest.mark.nightly
def test_a_rejection_and_one_by_time_leave_the_champion_and_are_final(store, registry, fault):
    fault.name, fault.stage = "a promotion is rejected", "promote"
    become_champion(registry, "former")
    built = offered(store)
    ledger = refresh_that_waits(built)
    assert decided(NAME, built.version, "rejected", ANNA, WHY).outcome == "not promoted"
    assert (number_of(registry), ledger.read().state) == ("1", "not_promoted")
    become_champion(registry, "rival")  # which alone must not bring it up again
    again = offered(store)
    assert (again.state, read_result(again.artifact).tags["verdict"]) == ("cached", "not promoted")
    with pytest.raises(ApprovalError, match="was rejected by anna"):
        decided(NAME, built.version, "approved", ANNA, WHY)

    hasty = {**ASKED, "within_hours": 1e-6}
    late = offered(store, "late", [1.0] * 100, hasty)
    assert is_pending(late.artifact)
    ledger = refresh_that_waits(late, "nightly-2")
    with pytest.raises(ApprovalError, match=r"was not approved by release or leads until .* counts as rejected"):
        decided(NAME, late.version, "approved", ANNA, WHY)
    assert read_verdict(late.artifact).outcome == "not promoted"
    assert offered(store, "late", [1.0] * 100, hasty).state == "built"
    assert (number_of(registry), ledger.read().state, is_pending(late.artifact)) == ("3", "not_promoted", False)


@pytest.mark.parametrize(
    ("moment", "moved"), [("create_registered_model 0", False), ("set_registered_model_alias 2", True)]
)
@pytest.mark.nightly
def test_a_kill_behind_the_approval_is_survived_and_the_hook_has_run_once(
    store,
    registry,
    fault,
    monkeypatch,
    moment,
    moved,
):
    fault.name, fault.stage = f"SIGKILL at {moment} behind an approval", "promote"
    become_champion(registry, "former")
    built = offered(store)
    ledger = refresh_that_waits(built)
    with monkeypatch.context() as faulty:
        faulty.setenv("PROMOTION_FAULT", moment)
        with pytest.raises(LifecycleError, match="SIGKILL"):
            decided(NAME, built.version, "approved", ANNA, WHY)
    assert (number_of(registry), ledger.read().state) == ("2" if moved else "1", "waiting_for_approval")
    with pytest.raises(ApprovalError, match=r"was approved by anna on .* already"):
        decided(NAME, built.version, "rejected", ANNA, WHY)
    with fault.timed("recovered"):
        # By the next refresh, or by the same command again, of whomever: the first decision counts.
        if moved:
            assert decided(NAME, built.version, "approved", ANNA, "once more").approval.endswith(WHY)
        else:
            assert offered(store).state == "built"
    assert (number_of(registry), number_of(registry, PREVIOUS), ledger.read().state) == ("2", "1", "completed")
    assert len(MlflowClient().search_model_versions(f"name = '{NAME}'")) == 2


@pytest.mark.nightly
def test_where_another_became_champion_the_approved_candidate_must_keep_the_gates_against_that(store, registry, fault):
    fault.name, fault.stage = "overtaken while it waited", "promote"
    first, second = offered(store, "a", GOOD, bound=2), offered(store, "b", BETTER, bound=2)
    worse = offered(store, "c", [1.0] * 50 + [0.0] * 50, bound=2)
    ledger = refresh_that_waits(worse)
    assert decided(NAME, first.version, "approved", ANNA, WHY).outcome == "promoted"
    verdict = decided(NAME, second.version, "approved", ANNA, WHY)
    assert (verdict.outcome, verdict.champion_version, number_of(registry)) == ("promoted", "1", "2")
    verdict = decided(NAME, worse.version, "approved", ANNA, WHY)
    assert (verdict.outcome, verdict.against, number_of(registry)) == ("not promoted", "champion (version 2)", "2")
    assert (verdict.approval, ledger.read().state) == (None, "not_promoted")


@pytest.mark.nightly
def test_a_candidate_whose_model_is_gone_cannot_be_approved(store, registry, fault):
    fault.name, fault.stage, fault.lost = (
        "the model of a candidate is removed while it waits",
        "promote",
        "the approval",
    )
    planned, upstream = offer(store, "candidate", BETTER, approval=ASKED, max_regression_standard_errors=None)
    built = run_stage(planned, upstream, store, Notes())
    shutil.rmtree(upstream["model"].artifact)
    with pytest.raises(ApprovalError, match=r"cannot be promoted: model-\w+ is no longer in the store; run its recipe"):
        decided(NAME, built.version, "approved", ANNA, WHY)
    assert number_of(registry) is None
    assert read_approval(built.artifact).is_awaited


@pytest.mark.nightly
def test_rollbacks_and_challengers_ask_those_who_approve_the_champions(store, registry, fault):
    fault.name, fault.stage = "a rollback and a canary ask", "promote"
    own = grp.getgrgid(pwd.getpwuid(os.getuid()).pw_gid).gr_name
    become_champion(registry, "former")
    for groups, mark, said in ((["no-such-group"], "a", "may not decide"), ([own], "b", "add --why")):
        built = offered(store, mark, BETTER, {"by": groups})
        assert read_approval(built.artifact).groups == ("no-such-group",), "those of the present champion decide"
        decided(NAME, built.version, "approved", Person("anna", frozenset({"no-such-group"})), WHY)
        before = [number_of(registry, alias) for alias in (CHAMPION, PREVIOUS, CHALLENGER)]
        for arguments in (["rollback", NAME], ["canary", NAME, "1"]):
            answer = CliRunner().invoke(cli, arguments)
            assert isinstance(answer.exception, ApprovalError) and said in str(answer.exception)
        assert [number_of(registry, alias) for alias in (CHAMPION, PREVIOUS, CHALLENGER)] == before
    CliRunner().invoke(cli, ["rollback", NAME, "--why", WHY])
    assert number_of(registry) == "2"
    approval = MlflowClient().get_model_version(NAME, "2").tags["lifecycle.approval"]
    assert approval.startswith("a rollback was approved by ") and approval.endswith(WHY)
    assert read_approval(offered(store, "c", BETTER, None).artifact).groups == (own,), "also about a recipe without"
