"""The scorer client against a server that misbehaves in every way that the protocol's table of faults names."""

import asyncio
import pickle
import socket
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from verl_tts.config.reward import ClientConfig
from verl_tts.errors import ConfigError, ScorerError, ScorerProtocolError, ScorerRejected, ScorerUnavailable
from verl_tts.rewards import client as client_module
from verl_tts.rewards.client import ScorerClient, request_metrics
from verl_tts.types import Score, Waveform

QUICK = {"timeout_s": 0.5, "retry_backoff_s": 0.01, "busy_timeout_s": 2.0, "startup_timeout_s": 0.5}
ALL_RETRIES_USED = 3  # max_retries is 2


def unused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}/score"


def ask(rig, speech: Waveform, *replies, clips: int = 1, probe: bool = False, pages=None, **settings):
    """The server, and what the client made of it: a list of scores, or the error."""

    async def main():
        async with rig.serve(*replies, pages=pages) as server:
            config = ClientConfig(**{"scorer_url": server.url, **QUICK, **settings})
            async with ScorerClient(config) as client:
                try:
                    if probe:
                        await client.probe()
                    work = [client.score(speech, "Good morning.", {"id": f"en-{i}"}) for i in range(clips)]
                    return server, await asyncio.gather(*work)
                except ScorerError as error:
                    return server, error

    return asyncio.run(main())


def test_a_score_comes_back_with_its_parts_and_texts(rig, speech):
    answer = {"score": 0.25, "cer": 0.75, "capped": True, "asr_text": "good", "model": None, "error": None}
    server, (score,) = ask(rig, speech, rig.http(200, answer))
    assert score.total == 0.25
    assert score.parts == {"cer": 0.75, "capped": 1.0}
    assert score.notes["asr_text"] == "good"
    assert score.notes["model"] is None
    assert server.posts[0]["num_samples"] == len(speech.samples_S)


def test_a_score_of_zero_is_a_score(rig, speech):
    _, (score,) = ask(rig, speech, rig.http(200, {"score": 0.0}))
    assert score.total == 0.0


# --- faults ----------------------------------------------------------------------------------------------------------


def is_retried(rig):
    return {
        "the connection is reset": rig.reset,
        "the connection closes in the head": rig.raw(b"HTTP/1.1 200 OK\r\nContent-Le"),
        "half a body": rig.raw(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"score"'),
        "it does not speak HTTP": rig.raw(b"220 smtp ready\r\n"),
        "no answer": rig.silence,
        "a body that drips in": rig.drip(200),
        "408": rig.http(408),
        "500": rig.http(500, "<html>oops</html>"),
        "500 with an error in it": rig.http(500, {"error": "out of memory"}),
        "502": rig.http(502),
        "503 without Retry-After": rig.http(503),
        "503 with a Retry-After that nobody can read": rig.http(503, headers=[("Retry-After", "soon")]),
        "a 500 with a score in it": rig.http(500, {"score": 0.5}),
    }


def is_rejected(rig):
    statuses = (300, 301, 302, 303, 304, 307, 308, 400, 401, 403, 404, 405, 409, 413, 422)
    return {
        **{str(status): rig.http(status, {"score": 0.5}) for status in statuses if status != 304},
        "304": rig.http(304),
        "a 400 that drips in": rig.drip(400),
        "error in the answer": rig.http(200, {"error": "model is broken"}),
        "error beside a score": rig.http(200, {"score": 0.5, "error": "model is broken"}),
        "an error that is empty": rig.http(200, {"score": 0.5, "error": ""}),
        "an error that is false": rig.http(200, {"score": 0.5, "error": False}),
    }


def is_no_answer(rig):
    bodies = {
        "nothing": b"",
        "HTML": b"<html>proxy login</html>",
        "half of a JSON text": b'{"score": 0.5',
        "not UTF-8": b'{"score": 0.5, "text": "\xff"}',
        "a list": b"[0.5]",
        "a number": b"0.5",
        "null": b"null",
        "no score": b'{"cer": 0.5}',
        "score true": b'{"score": true}',
        "score as a text": b'{"score": "0.7"}',
        "score NaN": b'{"score": NaN}',
        'score "NaN"': b'{"score": "NaN"}',
        "score Infinity": b'{"score": Infinity}',
        "score -Infinity": b'{"score": -Infinity}',
        "score 1e400": b'{"score": 1e400}',
        "score null": b'{"score": null}',
        "score as a list": b'{"score": [0.5]}',
        "score as an object": b'{"score": {"value": 0.5}}',
        "an integer beyond every float": b'{"score": 1' + b"0" * 400 + b"}",
        "a part that is NaN": b'{"score": 0.5, "cer": NaN}',
        "a part that is 1e400": b'{"score": 0.5, "cer": 1e400}',
        "a part that is a list": b'{"score": 0.5, "words": ["a"]}',
        "a part that is an object": b'{"score": 0.5, "cer": {"raw": 1}}',
        "the id of another sample": b'{"score": 0.5, "id": "en-7"}',
        "an id of another type": b'{"score": 0.5, "id": 0}',
        "num_samples of another sample": b'{"score": 0.5, "num_samples": 1}',
        "num_samples as a float": b'{"score": 0.5, "num_samples": 24000.0}',
        "more than 1 MiB": b'{"score": 0.5, "log": "' + b"x" * (1 << 20) + b'"}',
        "a hundred thousand brackets": b"[" * 100_000,
    }
    return {
        **{name: rig.http(200, body) for name, body in bodies.items()},
        **{f"{status} with a score": rig.http(status, {"score": 0.5}) for status in (201, 202, 203, 206)},
        "204": rig.raw(b"HTTP/1.1 204 No Content\r\n\r\n"),
        "a body that is not the gzip it says": rig.http(200, b"nope", headers=[("Content-Encoding", "gzip")]),
    }


def test_a_fault_that_may_pass_is_tried_again_and_then_is_unavailable(rig, speech):
    wrong = {}
    for name, reply in is_retried(rig).items():
        server, error = ask(rig, speech, reply, timeout_s=0.15)
        if not isinstance(error, ScorerUnavailable) or len(server.posts) != ALL_RETRIES_USED:
            wrong[name] = (error, len(server.posts))
    assert not wrong


def test_a_fault_that_passes_costs_a_retry_and_nothing_else(rig, speech):
    wrong = {}
    for name, reply in is_retried(rig).items():
        server, result = ask(rig, speech, reply, rig.OK, timeout_s=0.15)
        if isinstance(result, ScorerError) or result[0].total != 0.5 or result[0].notes["scorer_retries"] != 1:
            wrong[name] = (result, len(server.posts))
    assert not wrong


def test_what_will_not_pass_is_rejected_at_once(rig, speech):
    wrong = {}
    for name, reply in is_rejected(rig).items():
        server, error = ask(rig, speech, reply, rig.OK)
        if not isinstance(error, ScorerRejected) or len(server.posts) != 1:
            wrong[name] = (error, len(server.posts))
    assert not wrong


def test_an_answer_that_is_none_is_a_protocol_error_at_once(rig, speech):
    wrong = {}
    for name, reply in is_no_answer(rig).items():
        server, error = ask(rig, speech, reply, rig.OK, timeout_s=2.0)
        if not isinstance(error, ScorerProtocolError) or len(server.posts) != 1:
            wrong[name] = (error, len(server.posts))
    assert not wrong


@pytest.mark.parametrize("url", [unused_url(), "http://no-such-host.invalid/score"], ids=["refused", "unknown host"])
def test_a_scorer_that_is_not_there_is_unavailable(speech, rig, url):
    _, error = ask(rig, speech, scorer_url=url, timeout_s=5.0)
    assert isinstance(error, ScorerUnavailable)
    assert "after 3 attempts" in str(error)


def test_a_body_that_drips_in_is_over_when_the_attempt_is(rig, speech):
    started_s = time.monotonic()
    _, error = ask(rig, speech, rig.drip(200), timeout_s=0.3, max_retries=0)
    assert isinstance(error, ScorerUnavailable)
    assert 0.3 <= time.monotonic() - started_s < 1.5


def test_a_redirect_is_not_followed(rig, speech):
    async def main():
        async with rig.serve() as elsewhere, rig.serve(rig.http(307, headers=[("Location", elsewhere.url)])) as server:
            async with ScorerClient(ClientConfig(scorer_url=server.url, **QUICK)) as client:
                with pytest.raises(ScorerRejected, match="redirects are not followed"):
                    await client.score(speech, "Hi.", {"id": "a"})
            assert elsewhere.posts == []

    asyncio.run(main())


# --- busy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
def test_being_told_to_wait_uses_up_no_retry(rig, speech, status):
    busy = rig.http(status, headers=[("Retry-After", "0")])
    server, (score,) = ask(rig, speech, *[busy] * 5, rig.OK, max_retries=0)
    assert score.total == 0.5
    assert score.notes["scorer_retries"] == 0
    assert score.notes["scorer_waiting_s"] > 0
    assert len(server.posts) == 6


def test_429_without_a_time_waits_for_the_back_off(rig, speech):
    server, (score,) = ask(rig, speech, rig.http(429), rig.OK, max_retries=0)
    assert score.total == 0.5
    assert len(server.posts) == 2


def test_retry_after_may_be_a_date(rig, speech):
    moment = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    started_s = time.monotonic()
    _, (score,) = ask(rig, speech, rig.http(429, headers=[("Retry-After", moment)]), rig.OK, busy_timeout_s=5.0)
    assert score.total == 0.5
    assert time.monotonic() - started_s > 0.9  # a date has whole seconds


def test_no_single_wait_is_longer_than_the_limit(rig, speech, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_BUSY_WAIT_S", 0.1)
    _, (score,) = ask(rig, speech, rig.http(429, headers=[("Retry-After", "3600")]), rig.OK)
    assert score.total == 0.5
    assert score.notes["scorer_waiting_s"] < 1.0


def test_a_scorer_that_stays_busy_is_unavailable_after_busy_timeout(rig, speech):
    started_s = time.monotonic()
    _, error = ask(rig, speech, rig.http(429, "queue full", headers=[("Retry-After", "0")]), busy_timeout_s=0.5)
    assert isinstance(error, ScorerUnavailable)
    assert "of waiting as told: HTTP 429: queue full" in str(error)
    assert time.monotonic() - started_s < 1.5


def test_a_wait_that_would_go_beyond_busy_timeout_is_not_begun(rig, speech):
    started_s = time.monotonic()
    server, error = ask(rig, speech, rig.http(503, headers=[("Retry-After", "20")]), busy_timeout_s=5.0)
    assert isinstance(error, ScorerUnavailable)
    assert len(server.posts) == 1
    assert time.monotonic() - started_s < 1.0


# --- messages --------------------------------------------------------------------------------------------------------


def test_a_message_names_url_sample_attempts_and_what_came_back(rig, speech):
    server, error = ask(rig, speech, rig.http(500, "x" * 1000))
    assert str(error).startswith(f"{server.url}: sample 'en-0' has no score after 3 attempts: HTTP 500: xxx")
    assert len(str(error)) < len(server.url) + 300
    assert "\n" not in str(error)


def test_errors_arrive_from_another_process_as_they_were_raised(rig, speech):
    for reply in (rig.reset, rig.http(400, "no"), rig.http(200, "no")):
        _, error = ask(rig, speech, reply)
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
    server, error = ask(rig, speech, reply(rig))
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
    _, (score,) = ask(rig, speech)
    assert score.total == 0.5


# --- many requests, many addresses -----------------------------------------------------------------------------------


def slow(rig, delay_s: float):
    async def reply(reader, writer):
        await asyncio.sleep(delay_s)
        await rig.OK(reader, writer)

    return reply


def test_no_more_requests_are_in_flight_than_the_setting_says(rig, speech):
    server, scores = ask(rig, speech, slow(rig, 0.02), clips=20, max_in_flight=4)
    assert len(scores) == 20
    assert server.most_in_flight == 4


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
    _, error = ask(rig, speech, rig.http(200, {"score": score}), probe=True, pages=info(rig, score_range=[0, 1]))
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


# --- settings and figures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        {"scorer_url": "127.0.0.1:18080/score"},
        {"scorer_url": "ftp://host/score"},
        {"scorer_url": "http:///score"},
        {"scorer_url": "http://host:99999/score"},
        {"scorer_url": "http://user:password@host/score"},
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
    assert figures["latency_max_s"] == 3.0
    assert figures["slowest_id"] == "b"
    assert figures["retries"] == 2
    assert figures["waiting_s"] == 1.0
    assert request_metrics([("c", Score(0.0))]) == {}


def test_the_reward_room_imports_neither_torch_nor_verl_nor_a_server():
    code = "import sys, verl_tts.rewards.manager as m; assert not {'torch', 'verl', 'fastapi'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
