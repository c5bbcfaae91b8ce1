"""The scorer server, over HTTP, through our own client and through plain requests."""

import asyncio
import base64
import json
import threading
import time

import httpx
import numpy as np
import pytest

from verl_tts.config.reward import ClientConfig
from verl_tts.errors import ConfigError, ScorerRejected, ScorerUnavailable
from verl_tts.rewards.client import ScorerClient
from verl_tts.rewards.protocol import BadRequestError
from verl_tts.scorers.app import ServerSettings, serve
from verl_tts.scorers.constant import ConstantScorer
from verl_tts.scorers.duration import DurationScorer


def body(**changes) -> dict:
    """A request as the protocol's text has it, written without our own encoder."""
    samples = np.full(2_400, 0.1, "<f4")
    fields = {
        "protocol_version": "1",
        "waveform_f32_base64": base64.b64encode(samples.tobytes()).decode(),
        "num_samples": 2_400,
        "sample_rate": 24_000,
        "prompt": "Good morning.",
        "metadata": {"id": "en-1", "target_seconds": 0.2},
    }
    return {**fields, **changes}


def ask(origin: str, waveform, count: int, **settings):
    """Scores of ``count`` clips with ids "0", "1", ..., all at once."""

    async def main():
        config = ClientConfig(scorer_url=f"{origin}/score", retry_backoff_s=0.01, max_in_flight=64, **settings)
        async with ScorerClient(config) as client:
            return await asyncio.gather(*(client.score(waveform, "Hi.", {"id": str(i)}) for i in range(count)))

    return asyncio.run(main())


@pytest.mark.parametrize("path", ["/score", "/"])
def test_a_plain_request_gets_an_answer_on_both_paths(serving, path):
    with serving(DurationScorer()) as origin:
        response = httpx.post(origin + path, json=body())
    assert response.status_code == 200
    assert response.json() == {
        "id": "en-1",
        "num_samples": 2_400,
        "score": 0.5,
        "seconds": 0.1,
        "target_seconds": 0.2,
    }


def test_a_clip_without_an_id_gets_an_answer_without_one(serving, scripted):
    with serving(scripted()) as origin:
        assert httpx.post(f"{origin}/score", json=body(metadata={})).json() == {"num_samples": 2_400, "score": 0.5}


def test_the_optional_pages_are_there(serving):
    with serving(ConstantScorer(value=0.25)) as origin:
        assert httpx.get(f"{origin}/healthz").json() == {"status": "ok"}
        info = httpx.get(f"{origin}/info").json()
        assert (info["name"], info["version"], info["score_range"]) == ("constant", "1", [0.25, 0.25])
        assert len(info["fingerprint"]) == 64
        httpx.post(f"{origin}/score", json=body())
        httpx.post(f"{origin}/score", json={})
        metrics = httpx.get(f"{origin}/metrics").text
    assert 'scorer_requests_total{status="200"} 1.0' in metrics
    assert 'scorer_requests_total{status="400"} 1.0' in metrics
    assert "scorer_batch_size_count 1.0" in metrics


def test_a_fingerprint_is_that_of_the_settings_and_nothing_else():
    assert ConstantScorer(value=0.25).fingerprint() == ConstantScorer(value=0.25).fingerprint()
    assert ConstantScorer(value=0.25).fingerprint() != ConstantScorer(value=0.5).fingerprint()
    assert ConstantScorer().fingerprint() != DurationScorer().fingerprint()


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"{", "body"),
        (json.dumps(body(sample_rate=0)), "sample_rate"),
        (json.dumps(body(num_samples=1)), "num_samples"),
        (json.dumps(body(metadata={"id": "en-1"})), "metadata"),
        (json.dumps(body(metadata={"id": "en-1", "target_seconds": True})), "metadata"),
    ],
)
def test_a_bad_request_is_a_400_that_names_the_field(serving, content, field):
    with serving(DurationScorer()) as origin:
        response = httpx.post(f"{origin}/score", content=content)
    assert response.status_code == 400
    assert response.json()["error"].startswith(f"{field}: ")


@pytest.mark.parametrize("times", [2, 10])
def test_a_body_over_the_limit_is_a_413_and_our_client_says_so(serving, scripted, noise, times):
    with serving(scripted(), max_body_bytes=14_000 // times) as origin, pytest.raises(ScorerRejected, match="HTTP 413"):
        ask(origin, noise, 1)


def test_a_body_of_unknown_length_is_limited_too(serving, scripted):
    def chunks():
        for _ in range(100):
            yield b"x" * 1000

    with serving(scripted(), max_body_bytes=50_000) as origin:
        assert httpx.post(f"{origin}/score", content=chunks()).status_code == 413


def test_the_token_is_required_for_everything_but_the_health_page(serving, scripted, noise, monkeypatch):
    monkeypatch.delenv("SCORER_TOKEN", raising=False)
    with serving(scripted(), token="s3cret") as origin:
        assert httpx.get(f"{origin}/healthz").status_code == 200
        for path in ("/info", "/metrics"):
            assert httpx.get(origin + path).status_code == 401
        wrong = httpx.post(f"{origin}/score", json=body(), headers={"Authorization": "Bearer s3cre"})
        assert wrong.status_code == 401
        assert wrong.headers["www-authenticate"] == "Bearer"
        with pytest.raises(ScorerRejected, match="401"):
            ask(origin, noise, 1)
        monkeypatch.setenv("SCORER_TOKEN", "s3cret")
        assert ask(origin, noise, 1)[0].total == 0.5


def test_the_token_is_in_no_text_of_the_settings():
    assert "s3cret" not in repr(ServerSettings(token="s3cret"))


# --- batches ---------------------------------------------------------------------------------------------------------


def test_requests_that_wait_are_scored_together_and_answered_apart(serving, scripted, noise):
    scorer = scripted(lambda clip: int(clip.id) / 100)
    with serving(scorer, batch_size=8, batch_wait_ms=20) as origin:
        scores = ask(origin, noise, 32)
    assert [score.total for score in scores] == [i / 100 for i in range(32)]
    assert sum(scorer.batches) == 32
    assert max(scorer.batches) > 1
    assert max(scorer.batches) <= 8


def test_one_bad_clip_does_not_spoil_its_batch(serving, scripted):
    def score(clip):
        if clip.id == "en-bad":
            raise RuntimeError("cannot hear this\nat all")
        return 0.5

    async def main(origin):
        async with httpx.AsyncClient() as http:
            ids = ["en-1", "en-bad", "en-2"]
            posts = [http.post(f"{origin}/score", json=body(metadata={"id": name})) for name in ids]
            return await asyncio.gather(*posts)

    scorer = scripted(score)
    with serving(scorer, batch_wait_ms=200) as origin:
        good, bad, other = asyncio.run(main(origin))
    assert scorer.batches[0] == 3
    assert good.json() == {"id": "en-1", "num_samples": 2_400, "score": 0.5}
    assert other.json() == {"id": "en-2", "num_samples": 2_400, "score": 0.5}
    assert bad.status_code == 500
    assert bad.json() == {"error": "scoring failed: RuntimeError: cannot hear this at all"}


def test_a_score_that_is_no_number_is_a_500(serving, scripted):
    with serving(scripted(lambda _: float("nan"))) as origin:
        response = httpx.post(f"{origin}/score", json=body())
    assert response.status_code == 500
    assert "nan" in response.json()["error"]


def test_a_scorer_with_too_few_answers_is_a_500(serving, scripted):
    scorer = scripted()
    scorer.score_batch = lambda clips: []
    with serving(scorer) as origin:
        assert httpx.post(f"{origin}/score", json=body()).status_code == 500


def test_a_clip_that_its_scorer_refuses_is_a_400_and_joins_no_batch(serving, scripted):
    scorer = scripted()

    def check(clip):
        raise BadRequestError("metadata.speaker", "unknown")

    scorer.check = check
    with serving(scorer) as origin:
        response = httpx.post(f"{origin}/score", json=body())
    assert response.json() == {"error": "metadata.speaker: unknown"}
    assert scorer.batches == []


# --- a slow scorer ---------------------------------------------------------------------------------------------------


def held(scripted):
    """A scorer that waits until it is told to go on."""
    go_on = threading.Event()
    return go_on, scripted(lambda _: go_on.wait(20) and 0.5)


def test_a_slow_scorer_does_not_stop_the_server_from_answering(serving, scripted, noise):
    go_on, scorer = held(scripted)
    with serving(scorer) as origin:
        asking = threading.Thread(target=ask, args=(origin, noise, 4))
        asking.start()
        while not scorer.batches:
            time.sleep(0.01)
        assert httpx.get(f"{origin}/healthz", timeout=2).status_code == 200
        assert "scorer_requests_in_flight 4.0" in httpx.get(f"{origin}/metrics", timeout=2).text
        go_on.set()
        asking.join()


def test_a_full_queue_is_a_429_that_says_how_long_to_wait(serving, scripted, noise):
    go_on, scorer = held(scripted)
    with serving(scorer, max_queue=3) as origin:
        asking = threading.Thread(target=ask, args=(origin, noise, 3))
        asking.start()
        while "in_flight 3.0" not in httpx.get(f"{origin}/metrics").text:
            time.sleep(0.01)
        response = httpx.post(f"{origin}/score", json=body())
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 30
        with pytest.raises(ScorerUnavailable, match="429"):
            ask(origin, noise, 1, busy_timeout_s=0.5)
        go_on.set()
        asking.join()
        assert ask(origin, noise, 1)[0].total == 0.5


def test_64_requests_are_accepted_before_the_first_429(serving, scripted, noise):
    go_on, scorer = held(scripted)
    with serving(scorer, max_queue=64, batch_size=64) as origin:
        scores = []
        asking = threading.Thread(target=lambda: scores.extend(ask(origin, noise, 64, busy_timeout_s=0)))
        asking.start()
        while "in_flight 64.0" not in httpx.get(f"{origin}/metrics", timeout=20).text:
            time.sleep(0.02)
        go_on.set()
        asking.join()
    assert len(scores) == 64


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        {"max_queue": 0},
        {"batch_size": 0},
        {"batch_size": "8"},
        {"batch_size": 1.5},
        {"batch_wait_ms": -1},
        {"batch_wait_ms": 1e300},  # a batch that is not full would never be scored
    ],
)
def test_an_impossible_setting_is_refused_by_name(setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=name):
        ServerSettings(**setting)


@pytest.mark.parametrize(
    ("host", "port"), [("", 0), (5, 0), ("127.0.0.1", 65536), ("127.0.0.1", -1), ("127.0.0.1", "x")]
)
def test_an_address_that_is_none_is_refused(scripted, host, port):
    with pytest.raises(ConfigError, match=r"(host|port)=.* must be"):
        serve(scripted(), ServerSettings(), host, port)


def test_a_port_that_is_taken_is_one_line(serving, scripted):
    with serving(scripted()) as origin, pytest.raises(ConfigError, match=r"cannot listen on .*--port"):
        serve(scripted(), ServerSettings(), "127.0.0.1", int(origin.rpartition(":")[2]))
