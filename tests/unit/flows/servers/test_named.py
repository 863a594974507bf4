"""Requests to a Prefect server that the user named by URL carry the user's key, which is sent to no other host."""

import base64
from pathlib import Path

import pytest

from flows.champion import champions
from flows.running.request import RefreshRequest, make_plan
from flows.servers.local import status, up
from stages.core.errors import RecipeError, ServerError
from tests.lying_server import head, lying_server, whole

CREDENTIALS = "lifecycle:a-key-that-is-secret"


@pytest.mark.parametrize("refused", [whole(b"", "401 No"), head("401 No") + b"x" * 2**21])
def test_a_prefect_server_of_another_key_is_named_and_the_key_stays_with_it(
    refused: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = [whole(b""), refused]
    with lying_server(lambda send, _: send(asked.pop(0))) as server:
        monkeypatch.setenv("PREFECT_API_URL", f"{server.url}/api")
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", CREDENTIALS)
        with pytest.raises(ServerError, match="asks for another key than PREFECT_API_AUTH_STRING"):
            up()
        assert [base64.b64encode(CREDENTIALS.encode()) in request for request in server.requests] == [False, True]


def test_the_key_follows_no_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    with lying_server(lambda send, _: send(whole(b""))) as other:
        asked = [whole(b""), whole(b"", "307 Moved", Location=f"{other.url}/steal")]
        with lying_server(lambda send, _: send(asked.pop(0) if asked else whole(b"", "500 Gone"))) as server:
            monkeypatch.setenv("PREFECT_API_URL", f"{server.url}/api")
            monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
            monkeypatch.setenv("PREFECT_API_AUTH_STRING", CREDENTIALS)
            with pytest.raises(ServerError, match=r"the mlflow server .* does not answer"):
                up()
        assert not other.requests


def test_a_home_without_mlflow_asks_for_none_and_refuses_promotions(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = str(Path(__file__).parents[4] / "configs" / "quickstart.yaml")
    monkeypatch.setenv("LIFECYCLE_MLFLOW", "off")
    with lying_server(lambda send, _: send(whole(b""))) as server:
        monkeypatch.setenv("PREFECT_API_URL", f"{server.url}/api")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        assert "MLFLOW_TRACKING_URI" not in up().environment()
        assert [one.name for one in status()] == ["prefect", "worker"]
    with pytest.raises(ServerError, match="asking for champions: MLflow, which knows them, is switched off"):
        champions.find_mlflow()
    with pytest.raises(RecipeError, match=r"stages\.promote: promotions need MLflow, .* leave the stage out"):
        make_plan(RefreshRequest(recipe))
    assert make_plan(RefreshRequest(recipe, until="problems")).plan.stages
    monkeypatch.setenv("LIFECYCLE_MLFLOW", "no")
    with pytest.raises(ServerError, match="found 'no', expected `on` or `off`"):
        status()
