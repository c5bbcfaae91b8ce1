"""What the server answers to: vLLM-Omni's whole app with our list in front of it, but no engine."""

from contextlib import closing

import pytest
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from verl_tts.serving.routes import ANSWERED
from verl_tts.serving.server import _arguments, listen
from verl_tts.serving.speech import open_model


@pytest.fixture(scope="module")
def app(tiny_checkpoint, tmp_path_factory):
    """As ``omni_run_server_worker`` builds it, of the arguments that we hand to it."""
    from vllm_omni.entrypoints.openai import api_server

    stages = tmp_path_factory.mktemp("serving") / "stages.yaml"
    stages.write_text("stages: []\n")
    with closing(listen("127.0.0.1", 0)) as listener:
        args = _arguments(open_model(tiny_checkpoint).spec, stages, listener)
    app = api_server.build_openai_app(args, ("generate",))
    app.include_router(api_server.router)
    return app


def test_of_all_routes_that_come_with_the_server_those_of_the_list_alone_are_answered(app):
    asked = {(method, route.path) for route in app.routes if isinstance(route, Route) for method in route.methods}
    assert len(asked) > 30, "vLLM's and vLLM-Omni's"
    assert ("POST", "/v1/completions") in asked
    client = TestClient(app, raise_server_exceptions=False)
    answered = set()
    for method, path in asked:
        answer = client.request(method, path)
        if "there is no" not in answer.text and answer.status_code != 404:
            answered.add((method, path))
    assert answered == {("POST", "/v1/audio/speech"), ("GET", "/v1/models"), ("GET", "/health")}


def test_what_is_not_answered_says_what_is(app):
    answer = TestClient(app).post("/v1/audio/voices")
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message == f"there is no POST /v1/audio/voices here; there are: {', '.join(ANSWERED)}"


def test_no_websocket_is_opened(app):
    paths = [route.path for route in app.routes if isinstance(route, WebSocketRoute)]
    assert paths
    for path in paths:
        with pytest.raises(WebSocketDisconnect), TestClient(app).websocket_connect(path):
            pass


def test_a_browser_may_ask_for_the_options(app):
    headers = {"Origin": "http://localhost", "Access-Control-Request-Method": "POST"}
    assert TestClient(app).options("/v1/audio/speech", headers=headers).status_code == 200
