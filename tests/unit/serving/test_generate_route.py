"""The route beside vLLM-Omni's: HTTP, prompts and sampling parameters are real, the engine's answers are not."""

import asyncio
import base64
import io
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.testclient import TestClient

from verl_tts.errors import ConfigError
from verl_tts.rollout import qwen3_tts
from verl_tts.serving.generate_form import MAX_BODY_BYTES
from verl_tts.serving.server import GenerateForm, listen
from verl_tts.serving.speech import open_model

FRAMES = 3


class Engine:
    """In place of vLLM-Omni's client: what both stages would say for three frames and an EOS."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.error: Exception | None = None

    async def generate(self, **request: Any):
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        tokens = [5, 6, 7, 2150]
        table = np.zeros((FRAMES, 16), np.int64)
        table[:, 0] = tokens[:-1]
        talker = SimpleNamespace(
            token_ids=tokens,
            logprobs=[{token: SimpleNamespace(logprob=-1.0)} for token in tokens],
            multimodal_output={"codes": {"audio": table}},
        )
        audio = {"audio": np.full(FRAMES * 1920, 0.25, np.float32), "sr": 24_000}
        for stage, completion in enumerate((talker, SimpleNamespace(multimodal_output=audio))):
            yield SimpleNamespace(stage_id=stage, request_output=SimpleNamespace(outputs=[completion]))


@pytest.fixture(scope="module")
def speaker(tiny_checkpoint, places):
    from pathlib import Path

    return open_model(tiny_checkpoint, voice=Path(places["SPK_EMBED_PATH"]), max_frames=64)


@pytest.fixture
def served(speaker):
    form = GenerateForm(speaker, None, qwen3_tts)
    app = Starlette()
    app.add_route("/generate", form.answer, methods=["POST"])
    app.state.engine_client = Engine()
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client, app.state.engine_client


def test_the_answer_is_a_wav_file_in_base64(served):
    client, _ = served
    answer = client.post("/generate", json={"text": "Good morning."})
    assert answer.status_code == 200
    content = answer.json()
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(content["text"])))
    assert (len(samples), rate) == (FRAMES * 1920, 24_000)
    assert np.allclose(samples, 0.25, atol=1e-4)
    meta = content["meta_info"]
    assert (meta["finish_reason"], meta["completion_tokens"]) == ({"type": "stop"}, 4)


def test_the_engine_gets_what_the_request_says_and_the_published_rest(served):
    client, engine = served
    client.post("/generate", json={"text": "Hi.", "sampling_params": {"temperature": 0.5, "seed": 9}})
    (request,) = engine.requests
    talker, _ = request["sampling_params_list"]
    assert (talker.temperature, talker.top_p, talker.top_k, talker.repetition_penalty) == (0.5, 0.8, 50, 1.1)
    assert talker.max_tokens == 64, "the engine has room for no more"
    assert talker.seed == qwen3_tts.stream_seed(9, "codebook0")


def test_without_a_seed_no_two_requests_have_the_same(served):
    client, engine = served
    seeds = {client.post("/generate", json={"text": "Hi."}).json()["meta_info"]["seed"] for _ in range(4)}
    assert len(seeds) == 4
    assert len({request["request_id"] for request in engine.requests}) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b"\xff", "the body is not JSON"),
        (b" " * (MAX_BODY_BYTES + 1), "the body is larger than 1048576 bytes"),
        (json.dumps({"text": "word " * 2000}).encode(), "the limit is 512; cut it into sentences"),
        (json.dumps({"text": "${instruction:Softly.}Hi."}).encode(), "takes no instruction"),
    ],
)
def test_a_request_that_is_wrong_is_the_clients_fault_and_said_in_one_line(served, content, message):
    client, engine = served
    answer = client.post("/generate", content=content)
    assert answer.status_code == 400
    error = answer.json()["error"]["message"]
    assert message in error
    assert "\n" not in error
    assert not engine.requests


def test_a_client_that_goes_away_takes_its_request_along(speaker):
    engine, ended = Engine(), asyncio.Event()

    async def never(**request: Any):
        try:
            await asyncio.Event().wait()
            yield None
        finally:
            ended.set()

    async def run() -> list[dict[str, Any]]:
        engine.generate = never
        messages = [{"type": "http.request", "body": b'{"text": "Hi."}'}, {"type": "http.disconnect"}]
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
        scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=engine))

        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        answer = await GenerateForm(speaker, None, qwen3_tts).answer(Request(scope, receive))
        await asyncio.wait_for(ended.wait(), 10)
        return [answer.status_code]

    assert asyncio.run(run()) == [400]


def test_a_dead_engine_is_the_servers_fault_and_says_what_to_do(served):
    from vllm.v1.engine.exceptions import EngineDeadError

    client, engine = served
    engine.error = EngineDeadError()
    answer = client.post("/generate", json={"text": "Hi."})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        500,
        "a stage of the engine died; restart the server",
    )


def test_a_port_that_is_taken_or_is_none_is_one_line():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: .*; choose another --port"):
            listen("127.0.0.1", port)
    for wrong in (-1, 65536):
        with pytest.raises(ConfigError, match=f"--port {wrong} has to be"):
            listen("127.0.0.1", wrong)
    with pytest.raises(ConfigError, match="--host is empty"):
        listen("", 0)
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host"):
        listen("no.such.host.invalid", 0)
