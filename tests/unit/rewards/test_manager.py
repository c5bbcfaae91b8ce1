"""From a waveform to its reward: guards, then a server or a function, then parts with equal names."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl_tts.errors import ConfigError, RolloutError, ScorerError, ScorerProtocolError, ScorerRejected
from verl_tts.rewards.manager import PUBLISHED_CLIENT, RewardManager, mean_parts
from verl_tts.types import Waveform

SILENT = Waveform(np.zeros(24_000, np.float32), 24_000)
DURATION = {"path": "pkg://verl_tts.rewards.functions", "name": "duration"}


def score(rig, row, rollout, waveforms, *replies, pages=None, config=None):
    """The server, and the score of each waveform in turn."""

    async def main():
        async with rig.serve(*replies, pages=pages) as server:
            rewards = RewardManager.from_config({"scorer_url": server.url, "retry_backoff_s": 0.01, **(config or {})})
            scores = [await rewards.score(row, waveform, rollout) for waveform in waveforms]
            await rewards.aclose()
            return server, scores

    return asyncio.run(main())


def info(rig, **fields):
    return {"/info": rig.http(200, fields)}


def test_a_clip_goes_to_the_server_with_its_row(rig, row, rollout, speech):
    server, (result,) = score(rig, row, rollout, [speech], rig.http(200, {"score": 0.25, "cer": 0.75}))
    assert result.total == 0.25
    assert result.parts["cer"] == 0.75
    assert server.posts[0]["prompt"] == row.ground_truth
    assert server.posts[0]["metadata"] == {
        "id": "en-1",
        "split": "train",
        "index": 3,
        "speaker": "anna",
        "target_seconds": 2.0,
    }


def test_a_violation_gets_the_low_score_and_is_not_sent(rig, row, rollout):
    server, (result,) = score(rig, row, rollout, [SILENT], config={"violation_score": -1.0})
    assert result.total == -1.0
    assert result.parts["guard/silence"] == 1.0
    assert result.notes["violation"].startswith("silence: RMS 0.00e+00")
    assert server.posts == []


def test_a_broken_waveform_is_an_error_and_no_low_score(rig, row, rollout):
    with pytest.raises(RolloutError, match="en-1"):
        score(rig, row, rollout, [Waveform(np.full(24_000, np.nan, np.float32), 24_000)])


@pytest.mark.parametrize("announced", [True, False])
def test_all_scores_have_parts_of_the_same_names(rig, row, rollout, speech, announced):
    pages = info(rig, part_names=["cer"]) if announced else None
    answer = rig.http(200, {"score": 0.25, "cer": 0.75, "asr_text": "x"})
    _, scores = score(rig, row, rollout, [SILENT, speech, SILENT], answer, pages=pages)
    assert len({frozenset(result.parts) for result in scores}) == 1
    guards = {"no_audio", "silence", "too_short", "truncated", "empty_transcript"}
    assert {name for name in scores[0].parts if not name.startswith("clip/")} == {
        *(f"guard/{g}" for g in guards),
        "cer",
    }
    assert math.isnan(scores[0].parts["cer"])
    means = mean_parts(scores)
    assert means["cer"] == 0.75
    assert means["guard/silence"] == pytest.approx(2 / 3)


def test_a_part_that_is_missing_in_one_of_many_answers_is_a_protocol_error(rig, row, rollout, speech):
    replies = rig.http(200, {"score": 0.5, "cer": 0.5}), rig.http(200, {"score": 0.5})
    with pytest.raises(ScorerProtocolError, match=r"\['cer'\] as announced or as before"):
        score(rig, row, rollout, [speech, speech], *replies)


@pytest.mark.parametrize(
    "answer", [{"clip/rms": 0.5}, {"guard/silence": 1}, {"component/a": 1.0}, {"probe/x": 1}, {"violation": "silence"}]
)
def test_an_answer_cannot_take_the_names_of_the_trainer(rig, row, rollout, speech, answer):
    async def main():
        async with rig.serve(rig.http(200, {"score": 0.5, **answer})) as server:
            return await RewardManager.from_config({"scorer_url": server.url}).score(row, speech, rollout)

    with pytest.raises(
        ScorerProtocolError, match=rf"'en-1' has the key '{next(iter(answer))}', which is a name of the"
    ):
        asyncio.run(main())


def test_a_violation_may_not_pay_more_than_the_worst_speech(rig, row, rollout, speech):
    with pytest.raises(ConfigError, match=r"violation_score=0\.0 is above -1"):
        score(rig, row, rollout, [speech], pages=info(rig, score_range=[-1, 1]))


# --- a function in place of the server -------------------------------------------------------------------------------


def call(function_file, row, rollout, waveform, source: str, name: str = "f", reward: dict | None = None, **kwargs):
    function_file.write_text(source)
    node = {"path": str(function_file), "name": name, "reward_kwargs": kwargs}

    async def main():
        rewards = RewardManager.from_config(reward or {}, node)
        return await rewards.score(row, waveform, rollout)

    return asyncio.run(main())


@pytest.fixture
def function_file(tmp_path):
    return tmp_path / "my_reward.py"


ARGUMENTS = "(samples_S, sample_rate_hz, prompt, metadata, **kwargs)"


@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_a_function_sees_the_clip_and_its_arguments(function_file, row, rollout, speech, keyword):
    source = f"""{keyword} f{ARGUMENTS}:
    score = kwargs["base"] + metadata["target_seconds"]
    return {{"score": score, "seconds": len(samples_S) / sample_rate_hz, "heard": prompt}}
"""
    result = call(function_file, row, rollout, speech, source, base=0.5)
    assert result.total == 2.5
    assert result.parts["seconds"] == 1.0
    assert result.notes["heard"] == row.ground_truth


@pytest.mark.parametrize("result", ["0.5", "1", "np.float32(0.5)", "np.int64(1)", '{"score": np.float64(0.5)}'])
def test_a_function_may_return_a_number(function_file, row, rollout, speech, result):
    source = f"import numpy as np\ndef f{ARGUMENTS}: return {result}"
    assert call(function_file, row, rollout, speech, source).total in (0.5, 1.0)


@pytest.mark.parametrize(
    "result", ["True", "'0.7'", "None", "float('nan')", "float('inf')", "[0.5]", "{}", "{'score': None}", "np.bool_(1)"]
)
def test_a_function_obeys_the_rules_of_an_answer(function_file, row, rollout, speech, result):
    source = f"import numpy as np\ndef f{ARGUMENTS}: return {result}"
    with pytest.raises(ScorerProtocolError, match="en-1"):
        call(function_file, row, rollout, speech, source)


@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_what_a_function_raises_names_the_sample(function_file, row, rollout, speech, keyword):
    source = f"{keyword} f{ARGUMENTS}: raise KeyError('emotion')"
    with pytest.raises(ScorerRejected, match=r"my_reward\.py:f: sample 'en-1' has no score: it raised KeyError"):
        call(function_file, row, rollout, speech, source)


def test_an_error_that_a_function_reports_is_rejected(function_file, row, rollout, speech):
    with pytest.raises(ScorerRejected, match="out of disk"):
        call(function_file, row, rollout, speech, f"def f{ARGUMENTS}: return {{'score': 1.0, 'error': 'out of disk'}}")


@pytest.mark.parametrize(
    "source",
    [
        f"import time\ndef f{ARGUMENTS}: time.sleep(60)",
        f"import asyncio\nasync def f{ARGUMENTS}: await asyncio.sleep(60)",
    ],
    ids=["plain", "async"],
)
def test_a_function_that_never_returns_is_an_error_in_time(function_file, row, rollout, speech, source):
    with pytest.raises(ScorerError, match=r"no result within 0\.2 s"):
        call(function_file, row, rollout, speech, source, reward={"timeout_s": 0.2})


def test_a_function_cannot_spoil_the_audio(function_file, row, rollout, speech):
    before = speech.samples_S.copy()
    call(function_file, row, rollout, speech, f"def f{ARGUMENTS}:\n    samples_S[:] = 0\n    return 1.0")
    assert np.array_equal(speech.samples_S, before)


@pytest.mark.parametrize(
    ("source", "name", "kwargs", "message"),
    [
        ("x = 1", "f", {}, "has no function 'f'"),
        ("f = 1", "f", {}, "has no function 'f'"),
        ("def f(samples_S, sample_rate_hz, prompt, metadata): ...", "f", {"beta": 1}, "beta"),
        ("def f(samples_S): ...", "f", {}, "cannot be called"),
        ("import no_such_module", "f", {}, "no_such_module"),
        ("def f(:", "f", {}, "SyntaxError"),
    ],
)
def test_a_function_that_cannot_work_is_refused_before_the_start(
    function_file, row, rollout, speech, source, name, kwargs, message
):
    with pytest.raises(ConfigError, match=message):
        call(function_file, row, rollout, speech, source, name, **kwargs)


@pytest.mark.parametrize("path", ["no/such/file.py", "pkg://verl_tts.no_such_module"])
def test_a_path_that_leads_nowhere_is_refused(path):
    with pytest.raises(ConfigError, match=path):
        RewardManager.from_config({}, {"path": path, "name": "f"})


def test_the_fingerprint_of_a_function_changes_with_its_text_and_arguments(tmp_path):
    def fingerprint(folder: str, source: str, **kwargs) -> str | None:
        path = tmp_path / folder / "reward.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        rewards = RewardManager.from_config({}, {"path": str(path), "name": "f", "reward_kwargs": kwargs})
        return asyncio.run(rewards.probe()).fingerprint

    source = f"def f{ARGUMENTS}: return 1.0"
    assert fingerprint("a", source) == fingerprint("b", source)
    assert fingerprint("c", source + "  # 2") != fingerprint("a", source)
    assert fingerprint("d", source, beta=1) != fingerprint("a", source)


def test_duration_is_a_function_too(row, rollout, speech):
    result = asyncio.run(RewardManager.from_config({}, DURATION).score(row, speech, rollout))
    assert result.total == 0.5  # one second of two
    with pytest.raises(ScorerRejected, match="target_seconds"):
        asyncio.run(RewardManager.from_config({}, DURATION).score(replace(row, extra={}), speech, rollout))


# --- config ----------------------------------------------------------------------------------------------------------


def test_a_server_and_a_function_at_once_are_refused():
    with pytest.raises(ConfigError, match="set one of them to null"):
        RewardManager.from_config({"scorer_url": "http://127.0.0.1/score"}, DURATION)


def test_neither_a_server_nor_a_function_is_refused():
    with pytest.raises(ConfigError, match="scorer_url is not set"):
        RewardManager.from_config({}, {"path": None, "name": "compute_score"})


def test_an_omegaconf_node_is_read(rig, row, rollout, speech):
    async def main():
        async with rig.serve() as server:
            node = OmegaConf.create({"scorer_url": server.url, "guards": {"min_seconds": 0.2}})
            return await RewardManager.from_config(node).score(row, speech, rollout)

    assert asyncio.run(main()).total == 0.5


@pytest.mark.parametrize("node", [{"scorer_ulr": "x"}, {"guards": {"min_seconds": 1, "min_rsm": 0}}])
def test_an_unknown_key_is_refused(node):
    with pytest.raises(ConfigError, match=r"unknown key tts\.reward"):
        RewardManager.from_config(node)


def test_workers_share_the_requests_in_flight(rig, row, rollout, speech):
    async def slow(reader, writer):
        await asyncio.sleep(0.02)
        await rig.OK(reader, writer)

    async def main():
        async with rig.serve(slow) as server:
            rewards = RewardManager.from_config({"scorer_url": server.url, "max_in_flight": 8}, num_workers=4)
            await asyncio.gather(*(rewards.score(row, speech, rollout) for _ in range(12)))
            return server.most_in_flight

    assert asyncio.run(main()) == 2


def published(url: str, **changes) -> dict:
    kwargs = {"server_url": url, "timeout": 120.0, "max_retries": 2, "retry_backoff": 0.5, **changes}
    return {"path": PUBLISHED_CLIENT, "name": "compute_score", "reward_kwargs": kwargs}


def test_the_published_client_is_ours(rig, row, rollout, speech):
    async def main():
        async with rig.serve(rig.http(500)) as server:
            node = published(server.url, max_retries=1, retry_backoff=0.01)
            with pytest.raises(ScorerError, match="after 2 attempts"):
                await RewardManager.from_config({}, node).score(row, speech, rollout)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("reward", "changes", "message"),
    [
        ({}, {"server_ulr": "x"}, "server_ulr"),
        ({}, {"timeout": float("nan")}, "timeout_s"),
        ({}, {"max_retries": 1.5}, "max_retries"),
        ({}, {"server_url": None}, "scorer_url is not set"),
        ({"scorer_url": "http://elsewhere/score"}, {}, "differ"),
    ],
)
def test_arguments_of_the_published_client_are_checked(reward, changes, message):
    with pytest.raises(ConfigError, match=message):
        RewardManager.from_config(reward, published("http://127.0.0.1/score", **changes))
