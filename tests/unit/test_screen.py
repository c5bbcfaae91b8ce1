"""The numbers of a screening and its verdict, from clips made by hand; and its driver, with an engine in its place."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from verl_tts import screen
from verl_tts.commands import main as verl_tts
from verl_tts.config.compose import compose
from verl_tts.data.quickstart import quickstart_rows
from verl_tts.errors import RolloutError
from verl_tts.rollout.alone import Clip, roll_out_and_score
from verl_tts.types import CodecRollout, Conditioning, PromptRow, Score, Waveform

GIVEN = Conditioning([1], np.zeros(4), "Auto", None)


def clip(prompt, k, score, stop="eos", **parts):
    row = PromptRow(prompt, "Hi.", "train", 0, "demo", "Hi.")
    rollout = CodecRollout(np.ones(3, np.int64), np.ones((2, 16), np.int64), np.zeros(3, np.float32), stop, 0)
    return Clip(row, k, GIVEN, rollout, Waveform(np.zeros(3840, np.float32), 24000), Score(score, parts))


SCORES = {"a": (0.0, 1.0), "b": (0.5, 0.5)}
CLIPS = [clip(prompt, k, score, cer=score / 2) for prompt, scores in SCORES.items() for k, score in enumerate(scores)]


def test_numbers_are_those_of_the_groups():
    found = screen.summed_up(CLIPS, again=[(0.0, 0.1), (0.5, 0.5)], seconds=2.0)
    assert (found.prompts, found.samples, found.mean) == (2, 2, 0.5)
    assert found.spread == pytest.approx(0.25)  # 0.5 in a, 0 in b
    assert found.spread_of_parts == {"cer": pytest.approx(0.125)}
    assert found.flat_groups == 0.5
    assert found.best_of_group == 0.75
    assert found.headroom == pytest.approx(0.25)
    assert found.noise_over_seeds == pytest.approx(np.std([0.25, 0.75], ddof=1))
    assert found.scorer_noise == pytest.approx(0.05)
    assert (found.eos_rate, found.seconds_a_clip) == (1.0, 0.5)
    assert found.rtf == pytest.approx(2.0 / (4 * 0.16))


def test_the_order_in_which_clips_are_done_changes_nothing():
    backwards = screen.summed_up(CLIPS[::-1], again=[], seconds=2.0)
    assert backwards.noise_over_seeds == screen.summed_up(CLIPS, again=[], seconds=2.0).noise_over_seeds


def test_a_part_that_was_measured_in_one_clip_alone_has_no_spread():
    clips = [clip("a", 0, 0.0, cer=float("nan")), clip("a", 1, 1.0, cer=0.2)]
    assert screen.summed_up(clips, again=[], seconds=1.0).spread_of_parts == {}


GOOD = screen.summed_up([clip(p, k, s) for p in "ab" for k, s in enumerate((0.2, 0.8))], [(0.2, 0.2)], 1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"flat_groups": 0.8}, "80% of the groups are flat"),
        ({"best_of_group": 0.501}, "little to choose from"),
        ({"scorer_noise": 0.5}, "noise would be learned"),
        ({"eos_rate": 0.2}, "raise data.max_response_length"),
    ],
)
def test_each_reason_against_learning_is_said(change, reason):
    assert screen.verdict(GOOD) == (True, [])
    learns, against = screen.verdict(replace(GOOD, **change))
    assert not learns
    assert len(against) == 1
    assert reason in against[0]


def test_prompts_are_chosen_by_the_seed():
    rows = quickstart_rows()["train"]
    assert screen.choose(rows, 5, 1) == screen.choose(rows, 5, 1) != screen.choose(rows, 5, 2)
    assert screen.choose(rows, 500, 1) == rows


# ------------------------------------------------------------------ the driver


class Engine:
    """In the place of ``RolloutServer``: clips of as many frames as their seed says."""

    spec = SimpleNamespace(max_num_seqs=2)
    fails_at: str | None = None
    under_way = most = 0

    async def sample(self, request_id, *, prompt_ids, sampling_params, speaker, language, seed, sample_id):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if sample_id == self.fails_at:
            raise RolloutError(f"sample {sample_id}")
        frames = 1 + seed % 5
        rollout = CodecRollout(
            np.ones(frames + 1, np.int64),
            np.ones((frames, 16), np.int64),
            np.zeros(frames + 1, np.float32),
            "eos",
            seed,
        )
        return rollout, Waveform(np.full(1920 * frames, 0.1, np.float32), 24000)


class Rewards:
    async def score(self, row, waveform, rollout, *, held_out):
        return Score(float(len(rollout.codes_FQ)))


def drive(server, rewards=None, samples=3):
    config = compose(["tts.platform=cpu", "data.seed=7"])
    rows = quickstart_rows()["train"][:4]

    async def collect():
        wanted = [(row, k) for row in rows for k in range(samples)]
        return [
            clip
            async for clip in roll_out_and_score(
                config, server, lambda row: GIVEN, rewards, wanted, split="train", step=0
            )
        ]

    return asyncio.run(collect())


def test_every_pair_is_rolled_out_and_scored_once_with_a_seed_of_its_own():
    clips = drive(Engine(), Rewards())
    assert len({(clip.row.id, clip.k) for clip in clips}) == len({clip.rollout.seed for clip in clips}) == 12
    assert all(clip.score.total == len(clip.rollout.codes_FQ) for clip in clips)


def test_the_same_pairs_have_the_same_seeds_again():
    one, other = ({(c.row.id, c.k): c.rollout.seed for c in drive(Engine())} for _ in range(2))
    assert one == other


def test_no_more_are_under_way_than_the_engine_takes():
    server = Engine()
    drive(server)
    assert server.most == 2


def test_the_first_failure_ends_the_others_and_is_raised():
    server = Engine()
    server.fails_at = f"{quickstart_rows()['train'][1].id}#1"
    with pytest.raises(RolloutError, match=server.fails_at):
        drive(server)


# ------------------------------------------------------------------ the command


@pytest.mark.parametrize(("found", "code"), [(GOOD, 0), (replace(GOOD, flat_groups=1.0), 3)])
def test_the_verdict_is_the_exit_code_and_the_last_words(places, monkeypatch, capfd, tmp_path, found, code):
    monkeypatch.setattr(screen, "screen", lambda config, number: found)
    words = [
        "tts.platform=cpu",
        f"actor_rollout_ref.model.path={places['MODEL_PATH']}",
        f"data.train_files={places['TRAIN_FILE']}",
        f"data.val_files={places['VAL_FILE']}",
        f"tts.speaker_path={places['SPK_EMBED_PATH']}",
        f"tts.reward.scorer_url={places['SCORER_URL']}",
    ]
    assert verl_tts(["screen", *words, "--prompts", "2", "--json", str(tmp_path / "found.json")]) == code
    assert ("there is something to learn" in capfd.readouterr().out) is (code == 0)
    assert json.loads((tmp_path / "found.json").read_text())["mean"] == found.mean


def test_a_mistake_is_one_line_and_starts_nothing(capfd):
    assert verl_tts(["screen", "tts.platform=cpu", "data.train_batch_sise=1"]) == 2
    assert verl_tts(["screen", "--prompts", "0"]) == 2
    assert "Traceback" not in capfd.readouterr().err
