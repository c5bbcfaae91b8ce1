"""The scorer client's messages, limits, start-up and figures; faults are in tests/contract/test_scorer_protocol.py."""

import asyncio
import gzip
import pickle
import subprocess
import sys
import time
import traceback

import pytest

from tests.scorer_rig import QUICK, ask, unused_url
from verl_tts.config.reward import ClientConfig
from verl_tts.errors import ConfigError, ScorerProtocolError, ScorerRejected, ScorerUnavailable
from verl_tts.rewards.client import ScorerClient, request_metrics
from verl_tts.types import Score


def test_a_score_comes_back_with_its_parts_and_texts(rig, speech):
    answer = {"score": 0.25, "cer": 0.75, "capped": True, "asr_text": "good", "model": None, "error": None}
    server, (score,) = ask(speech, rig.http(200, answer))
    assert score.total == 0.25
    assert score.parts == {"cer": 0.75, "capped": 1.0}
    assert score.notes["asr_text"] == "good"
    assert score.notes["model"] is None
    assert server.posts[0]["num_samples"] == len(speech.samples_S)


def test_a_score_of_zero_is_a_score(rig, speech):
    _, (score,) = ask(speech, rig.http(200, {"score": 0.0}))
    assert score.total == 0.0


# --- messages --------------------------------------------------------------------------------------------------------


def test_a_message_names_url_sample_attempts_and_what_came_back(rig, speech):
    server, error = ask(speech, rig.http(500, "x" * 1000))
    assert str(error).startswith(f"{server.url}: sample 'en-0' has no score after 3 attempts: HTTP 500: xxx")
    assert len(str(error)) < len(server.url) + 300
    assert "\n" not in str(error)


def test_what_came_back_cannot_command_a_terminal(rig, speech):
    for reply in (rig.http(400, b"\x1b[2J\x07bad"), rig.http(200, b'{"error": "\\u001b[2J\\u0007bad"}')):
        _, error = ask(speech, reply)
        assert "bad" in str(error)
        assert str(error).isprintable()


def test_an_answer_that_is_compressed_is_not_unpacked(rig, speech):
    """A megabyte of it could be a terabyte, and nobody has asked for it."""
    body = gzip.compress(b'{"score": 0.5}')
    _, error = ask(speech, rig.http(200, body, headers=[("Content-Encoding", "gzip, gzip")]))
    assert isinstance(error, ScorerProtocolError)
    assert "compressed (gzip, gzip)" in str(error)


def test_errors_arrive_from_another_process_as_they_were_raised(rig, speech):
    for reply in (rig.reset, rig.http(400, "no"), rig.http(200, "no")):
        _, error = ask(speech, reply)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)


@pytest.mark.parametrize(
    "reply",
    [
        lambda rig: rig.http(403, "bad token s3cret"),
        lambda rig: rig.http(302, headers=[("Location", "http://login/?token=s3cret")]),
        lambda rig: rig.http(200, "your token was s3cret"),
        lambda rig: rig.http(200, {"error": "your token was s3cret"}),
    ],
    ids=["status", "redirect", "body", "error"],
)
def test_the_token_is_sent_and_never_shown(rig, speech, monkeypatch, reply):
    monkeypatch.setenv("SCORER_TOKEN", "s3cret")
    server, error = ask(speech, reply(rig))
    assert "Authorization: Bearer s3cret" in server.headers[0]
    assert "***" in str(error)
    assert "s3cret" not in "".join(traceback.format_exception(error))


def test_a_token_that_no_header_can_carry_is_refused_unseen(monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", "s3cret\n")
    with pytest.raises(ConfigError) as caught:
        ScorerClient(ClientConfig(scorer_url="http://127.0.0.1/score"))
    assert "s3cret" not in str(caught.value)


def test_the_proxy_of_the_shell_gets_no_audio(rig, speech, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", unused_url())
    _, (score,) = ask(speech)
    assert score.total == 0.5


# --- many requests, many addresses -----------------------------------------------------------------------------------


def slow(rig, delay_s: float):
    async def reply(reader, writer):
        await asyncio.sleep(delay_s)
        await rig.OK(reader, writer)

    return reply


def test_no_more_requests_are_in_flight_than_the_setting_says(rig, speech):
    server, scores = ask(speech, slow(rig, 0.02), clips=20, max_in_flight=4)
    assert len(scores) == 20
    assert server.most_in_flight == 4


def test_32_requests_at_once_take_far_less_than_one_after_the_other(rig, speech):
    """By default; a scorer that takes its time blocks nobody but who waits for it."""
    began = time.monotonic()
    server, scores = ask(speech, slow(rig, 0.2), clips=32)
    assert len(scores) == 32
    assert server.most_in_flight > 1
    assert time.monotonic() - began < 32 * 0.2 / 2


def test_requests_are_spread_over_the_addresses(rig, speech):
    async def main():
        async with rig.serve() as one, rig.serve() as two:
            config = ClientConfig(scorer_url=f"{one.url}, {two.url}", **QUICK)
            async with ScorerClient(config) as client:
                await client.probe()
                await asyncio.gather(*(client.score(speech, "Hi.", {"id": str(i)}) for i in range(10)))
            assert len(one.posts) == len(two.posts) == 5

    asyncio.run(main())


def test_one_dead_address_of_several_is_an_error(rig, speech):
    async def main():
        async with rig.serve() as alive:
            dead = unused_url()
            async with ScorerClient(ClientConfig(scorer_url=f"{alive.url},{dead}", **QUICK)) as client:
                await client.score(speech, "Hi.", {"id": "a"})
                with pytest.raises(ScorerUnavailable, match=dead):
                    await client.score(speech, "Hi.", {"id": "b"})

    asyncio.run(main())


def info(rig, **fields):
    return {"/info": rig.http(200, {"name": "x", "version": "1", "fingerprint": "f" * 64, **fields})}


def test_addresses_with_different_fingerprints_are_refused(rig):
    async def main():
        async with (
            rig.serve(pages=info(rig)) as one,
            rig.serve(pages=info(rig, fingerprint="0" * 64)) as two,
            ScorerClient(ClientConfig(scorer_url=f"{one.url},{two.url}", **QUICK)) as client,
        ):
            with pytest.raises(ScorerProtocolError, match="not the same scorer"):
                await client.probe()

    asyncio.run(main())


# --- start-up --------------------------------------------------------------------------------------------------------


def probe(rig, pages, **settings):
    async def main():
        async with rig.serve(pages=pages) as server:
            config = ClientConfig(scorer_url=server.url, **{**QUICK, **settings})
            async with ScorerClient(config) as client:
                return await client.probe()

    return asyncio.run(main())


def test_a_scorer_without_the_optional_pages_is_accepted(rig):
    assert probe(rig, {}).fingerprint is None


def test_the_probe_learns_who_scores(rig):
    known = probe(rig, info(rig, score_range=[0, None], model="m", revision=None, part_names=["cer"]))
    assert (known.name, known.model, known.fingerprint) == ("x", "m", "f" * 64)
    assert known.score_range == (0, None)
    assert known.part_names == ("cer",)


@pytest.mark.parametrize("score", [-0.01, 1.01])
def test_a_score_outside_the_range_of_info_is_a_protocol_error(rig, speech, score):
    _, error = ask(speech, rig.http(200, {"score": score}), probe=True, pages=info(rig, score_range=[0, 1]))
    assert isinstance(error, ScorerProtocolError)
    assert "[0, 1]" in str(error)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": 1},
        {"fingerprint": ["x"]},
        {"score_range": [1, 0]},
        {"score_range": [0]},
        {"score_range": "0..1"},
        {"score_range": [0, True]},
        {"score_range": None},
    ],
    ids=str,
)
def test_an_info_page_that_breaks_the_protocol_is_an_error(rig, fields):
    with pytest.raises(ScorerProtocolError, match="/info"):
        probe(rig, info(rig, **fields))


@pytest.mark.parametrize("body", ["", "<html>", "[]", "NaN"])
def test_an_info_page_that_is_no_object_is_an_error(rig, body):
    with pytest.raises(ScorerProtocolError, match="/info"):
        probe(rig, {"/info": rig.http(200, body)})


def test_an_info_page_that_is_forbidden_is_an_error_at_once(rig):
    started_s = time.monotonic()
    with pytest.raises(ScorerRejected, match="401"):
        probe(rig, {"/info": rig.http(401)}, startup_timeout_s=10.0)
    assert time.monotonic() - started_s < 2.0


@pytest.mark.parametrize("health", ["refused", 500, 302, 401, "silent"])
def test_a_scorer_that_does_not_get_ready_is_unavailable_after_startup_timeout(rig, health):
    async def main():
        pages = {"/healthz": rig.silence if health == "silent" else rig.http(health if health != "refused" else 500)}
        async with rig.serve(pages=pages) as server:
            url = unused_url() if health == "refused" else server.url
            async with ScorerClient(ClientConfig(scorer_url=url, **QUICK)) as client:
                await client.probe()

    started_s = time.monotonic()
    with pytest.raises(ScorerUnavailable, match=r"no scorer within 0\.5 s"):
        asyncio.run(main())
    assert time.monotonic() - started_s < 2.5


def test_the_start_waits_for_a_scorer_that_is_still_loading(rig):
    async def main():
        pages = {"/healthz": rig.http(503)}
        async with rig.serve(pages=pages) as server:
            config = ClientConfig(scorer_url=server.url, **{**QUICK, "startup_timeout_s": 5.0})
            async with ScorerClient(config) as client:
                waiting = asyncio.create_task(client.probe())
                await asyncio.sleep(0.4)
                assert not waiting.done()
                pages["/healthz"] = rig.http(200, {"status": "ok"})
                await waiting

    asyncio.run(main())


def greeted(rig, greeting, **settings):
    async def main():
        async with rig.serve() as server:
            server.greeting = greeting
            config = ClientConfig(scorer_url=f"{server.url}/v2", **{**QUICK, **settings})
            async with ScorerClient(config) as client:
                return await client.probe()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, "Not Found"),
        (405, ""),
        (410, ""),
        (501, ""),
        (301, ""),
        (308, ""),
        (200, "<html>login</html>"),
        (200, "[]"),
    ],
)
def test_a_path_at_which_nobody_scores_is_found_at_the_start_and_named(rig, status, body):
    with pytest.raises(
        ConfigError, match=rf"/score/v2: nobody scores at the path '/score/v2' \(HTTP {status}"
    ) as found:
        greeted(rig, rig.http(status, body, headers=[("Location", "http://elsewhere/")]))
    assert str(found.value).endswith("/score")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "greeting",
    [
        lambda rig: rig.http(400, {"error": "metadata.speaker: unknown"}),
        lambda rig: rig.http(422, "no"),
        lambda rig: rig.http(429),
        lambda rig: rig.http(500, "it crashed"),
        lambda rig: rig.http(200, {"error": "too short"}),
        lambda rig: rig.http(200, {"score": 0.5}),
        lambda rig: rig.reset,
        lambda rig: rig.silence,
        lambda rig: rig.drip(200),
    ],
    ids=["400", "422", "429", "500", "error", "score", "reset", "silence", "drip"],
)
def test_whatever_else_is_said_to_a_moment_of_silence_does_not_stop_the_start(rig, greeting):
    assert greeted(rig, greeting(rig), timeout_s=0.3).fingerprint is None


# --- settings and figures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        {"scorer_url": "127.0.0.1:18080/score"},
        {"scorer_url": "ftp://host/score"},
        {"scorer_url": "http:///score"},
        {"scorer_url": "http://host:99999/score"},
        {"scorer_url": "http://user:password@host/score"},
        {"scorer_url": "http://host/score http://other/score"},
        {"scorer_url": "http://host/\ud800"},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": "120"},
        {"timeout_s": True},
        {"max_retries": 1.5},
        {"max_retries": -1},
        {"retry_backoff_s": float("inf")},
        {"busy_timeout_s": -1},
        {"max_in_flight": 0},
        {"timeout_s": 10**400},
    ],
    ids=lambda setting: str(setting)[:60],
)
def test_an_impossible_setting_is_refused_by_name(setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=name) as caught:
        ClientConfig(**setting)
    assert "password" not in str(caught.value)


def test_a_host_that_no_name_can_be_is_refused_by_the_client():
    with pytest.raises(ConfigError, match="'http://xn--/' is not an HTTP address"):
        ScorerClient(ClientConfig(scorer_url="http://xn--/"))


def test_a_client_without_an_address_is_refused():
    with pytest.raises(ConfigError, match="scorer_url is not set"):
        ScorerClient(ClientConfig(scorer_url=" , "))


def test_figures_of_a_step_skip_clips_that_were_not_sent():
    def served(latency_s: float, retries: int = 0) -> Score:
        notes = {"scorer_latency_s": latency_s, "scorer_retries": retries, "scorer_waiting_s": 0.5}
        return Score(0.5, notes=notes)

    figures = request_metrics([("a", served(1.0)), ("b", served(3.0, retries=2)), ("c", Score(0.0))])
    assert figures["requests"] == 2
    assert figures["latency_p50_s"] == 2.0
    assert 2.0 < figures["latency_p95_s"] <= 3.0
    assert figures["latency_max_s"] == 3.0
    assert figures["slowest_id"] == "b"
    assert figures["retries"] == 2
    assert figures["waiting_s"] == 1.0
    assert request_metrics([("c", Score(0.0))]) == {}


def test_the_reward_room_imports_neither_torch_nor_verl_nor_a_server():
    code = "import sys, verl_tts.rewards.manager as m; assert not {'torch', 'verl', 'fastapi'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
