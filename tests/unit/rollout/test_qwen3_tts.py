"""What a request to the two stages says, and what is made of their answer.

Shapes: ``T`` sampled token, ``F`` codec frame, ``Q`` codebook, ``S`` audio sample, ``R`` row of the code table.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from tests.unit.rollout.small_spec import SPEC
from verl_tts.errors import CheckpointError, ConfigError, DataError, RolloutError
from verl_tts.models import qwen3_tts_prompt as prompts
from verl_tts.rollout import qwen3_tts as module
from verl_tts.rollout.qwen3_tts import CODE2WAV, CODEC_EOS, TALKER, Conditioner, align_codes, read, request, topology
from verl_tts.rollout.stages import KV_BLOCK_TOKENS, PROMPT_MARGIN
from verl_tts.types import PromptRow

Q = prompts.NUM_CODEBOOKS


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> dict:
    return json.loads((tiny_checkpoint / "config.json").read_text())


# ------------------------------------------------------------------------------------------------ codes


codes = st.integers(1, 20).flatmap(
    lambda frames: hnp.arrays(np.int64, (frames, Q), elements=st.integers(1, module.CODEBOOK_SIZE - 1))
)


@given(codes, st.integers(0, 30), st.integers(0, 5), st.sampled_from([CODEC_EOS, 5]))
def test_codes_are_found_behind_any_number_of_empty_rows(codes_FQ, before, after, last):
    """A row of zeros per prompt position comes first, and more may follow: id 0 is never sampled."""
    table_RQ = np.concatenate([np.zeros((before, Q), np.int64), codes_FQ, np.zeros((after, Q), np.int64)])
    tokens = [*codes_FQ[:, 0].tolist(), last]
    aligned_FQ = align_codes(table_RQ, tokens, "a")
    assert np.array_equal(aligned_FQ, codes_FQ)
    aligned_FQ[:] = 0
    assert np.array_equal(table_RQ[before : before + len(codes_FQ)], codes_FQ), "the engine's table stays as it is"


@given(hnp.arrays(np.int64, (9, Q), elements=st.integers(0, 3)))
def test_an_immediate_eos_has_no_codes_whatever_the_table_holds(table_RQ):
    for table in (table_RQ, table_RQ[:0]):
        assert align_codes(table, [CODEC_EOS], "a").shape == (0, Q)


@given(codes, st.data())
def test_a_frame_that_does_not_fit_its_token_is_an_error_with_the_samples_name(codes_FQ, data):
    tokens = [*codes_FQ[:, 0].tolist(), CODEC_EOS]
    place = data.draw(st.integers(0, len(codes_FQ) - 1))
    codes_FQ[place, 0] = (codes_FQ[place, 0] + 1) % module.CODEBOOK_SIZE
    with pytest.raises(RolloutError, match=r"sample row-7#2: .* do not contain the \d+ sampled ids"):
        align_codes(codes_FQ, tokens, "row-7#2")


def rows(*codebook0: int) -> np.ndarray:
    table_RQ = np.ones((len(codebook0), Q), np.int64)
    table_RQ[:, 0] = codebook0
    return table_RQ


@pytest.mark.parametrize(
    ("table_RQ", "tokens", "message"),
    [
        (rows(0, 7, 9, 7, 9), [7, 9, CODEC_EOS], "5 rows of residual codes contain 2 times the 2 sampled ids"),
        (rows(7, 7, 7), [7, 7, CODEC_EOS], "contain 2 times"),
        (rows(7), [7, 9, CODEC_EOS], "do not contain the 2 sampled ids"),
        (rows(), [7, CODEC_EOS], "0 rows of residual codes do not contain"),
        (np.ones((3, Q - 1), np.int64), [1, CODEC_EOS], r"shape \(3, 15\), not \(rows, 16\)"),
        (np.ones(3, np.int64), [1, CODEC_EOS], r"shape \(3,\)"),
    ],
)
def test_no_place_or_more_than_one_for_the_sampled_ids_is_an_error(table_RQ, tokens, message):
    with pytest.raises(RolloutError, match=f"sample a: .*{message}"):
        align_codes(table_RQ, tokens, "a")


@pytest.mark.parametrize("code", [-1, module.CODEBOOK_SIZE])
def test_a_residual_code_outside_the_codebook_is_an_error_that_says_which(code):
    table_RQ = rows(7, 9)
    table_RQ[1, 4] = code
    with pytest.raises(RolloutError, match=rf"sample a: a residual code is {code}, outside \[0, 2048\)"):
        align_codes(table_RQ, [7, 9, CODEC_EOS], "a")


# ------------------------------------------------------------------------------------------------ answers


def talker(tokens, table_RQ, logprobs=None):
    """As vLLM-Omni's output of stage 0: one mapping a token, from the sampled id to its log-prob."""
    if logprobs is None:
        logprobs = [{token: SimpleNamespace(logprob=-0.5 - i)} for i, token in enumerate(tokens)]
    parts = {} if table_RQ is None else {"codes": {"audio": table_RQ}}
    return output(SimpleNamespace(token_ids=tokens, logprobs=logprobs, multimodal_output=parts))


def code2wav(samples_S, rate=24_000):
    return output(SimpleNamespace(multimodal_output={"audio": samples_S, "sr": rate}))


def output(completion):
    return SimpleNamespace(request_output=SimpleNamespace(outputs=[completion]))


def noise(frames: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(1, frames * prompts.SAMPLES_PER_FRAME)).astype(np.float32)


def test_an_answer_becomes_a_rollout_and_its_waveform():
    audio = noise(2)
    outputs = {TALKER: talker([7, 9, CODEC_EOS], rows(0, 0, 7, 9)), CODE2WAV: code2wav(audio, np.array([24_000]))}
    rollout, waveform = read(outputs, seed=5, sample_id="a")
    assert rollout.tokens_T.tolist() == [7, 9, CODEC_EOS]
    assert rollout.codes_FQ[:, 0].tolist() == [7, 9]
    assert rollout.logprobs_T.tolist() == [-0.5, -1.5, -2.5]
    assert (rollout.tokens_T.dtype, rollout.codes_FQ.dtype, rollout.logprobs_T.dtype) == (
        np.int64,
        np.int64,
        np.float32,
    )
    assert (rollout.stop_reason, rollout.seed) == ("eos", 5)
    assert np.array_equal(waveform.samples_S, audio[0])
    assert (waveform.samples_S.dtype, waveform.sample_rate_hz, waveform.seconds) == (np.float32, 24_000, 0.16)


def test_a_sample_that_the_limit_cut_off_says_so():
    outputs = {TALKER: talker([7, 9, 11], rows(7, 9)), CODE2WAV: code2wav(noise(2))}
    rollout, _ = read(outputs, 0, "a")
    assert rollout.stop_reason == "length"
    assert len(rollout.codes_FQ) == 2, "the token that was cut off has no residual codes"


@pytest.mark.parametrize("table_RQ", [None, rows(0, 0), rows()])
@pytest.mark.parametrize("second", [{}, {CODE2WAV: code2wav(None)}, {CODE2WAV: code2wav(np.zeros(0))}])
def test_an_immediate_eos_is_a_rollout_without_sound(table_RQ, second):
    rollout, waveform = read({TALKER: talker([CODEC_EOS], table_RQ)} | second, 0, "a")
    assert (len(rollout.tokens_T), len(rollout.codes_FQ), rollout.stop_reason) == (1, 0, "eos")
    assert (len(waveform.samples_S), waveform.sample_rate_hz) == (0, 24_000)


def broken_samples() -> np.ndarray:
    samples = noise(2)
    samples[0, 17] = np.nan
    return samples


GOOD = {TALKER: talker([7, 9, CODEC_EOS], rows(7, 9)), CODE2WAV: code2wav(noise(2))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({TALKER: None}, "the talker returned nothing"),
        ({TALKER: talker([], rows())}, "the talker sampled no token"),
        ({TALKER: talker([7, 9, CODEC_EOS], rows(7, 9), logprobs=[])}, "0 log-probs for 3 sampled tokens"),
        ({TALKER: talker([7, 9, CODEC_EOS], rows(7, 9), [{7: SimpleNamespace(logprob=-1)}])}, "1 log-probs for 3"),
        ({TALKER: talker([7, 9, CODEC_EOS], rows(7, 8))}, "do not contain"),
        ({TALKER: talker([7, 9, CODEC_EOS], None)}, "0 rows of residual codes do not contain"),
        ({CODE2WAV: None}, "0 audio samples for 2 frames, expected 3840"),
        ({CODE2WAV: code2wav(noise(1))}, "1920 audio samples for 2 frames, expected 3840"),
        ({CODE2WAV: code2wav(noise(3))}, "5760 audio samples for 2 frames"),
        ({CODE2WAV: code2wav(broken_samples())}, "the decoded waveform is not finite"),
    ],
)
def test_parts_of_an_answer_that_do_not_fit_are_an_error_with_the_samples_name(changes, message):
    outputs = {stage: answer for stage, answer in (GOOD | changes).items() if answer is not None}
    with pytest.raises(RolloutError, match=rf"sample row-3#0: .*{message}"):
        read(outputs, 0, "row-3#0")


# ------------------------------------------------------------------------------------------------ stages


specs = st.builds(
    replace,
    st.just(SPEC),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    max_prompt_tokens=st.integers(1, 3000),
    max_response_tokens=st.integers(1, 2000),
    max_num_seqs=st.integers(1, 200),
    max_num_batched_tokens=st.integers(1, 10_000),
)


@given(specs)
def test_the_talkers_cache_holds_every_request_at_its_longest(config, spec):
    """So none is preempted: a preempted request loses the codes that it had."""
    talker_stage, _ = topology(spec, config)["stages"]
    talker_config = config["talker_config"]
    values = 2 * talker_config["num_hidden_layers"] * talker_config["num_key_value_heads"] * talker_config["head_dim"]
    block_bytes = values * (4 if spec.dtype == "float32" else 2) * KV_BLOCK_TOKENS
    blocks_of_one = -(-talker_stage["max_model_len"] // KV_BLOCK_TOKENS)
    # vLLM keeps one block for itself.
    assert talker_stage["kv_cache_memory_bytes"] // block_bytes >= talker_stage["max_num_seqs"] * blocks_of_one + 1
    assert talker_stage["max_model_len"] >= spec.max_prompt_tokens + spec.max_response_tokens


@given(specs)
def test_nothing_is_ever_scheduled_in_part(config, spec):
    """A prompt's embeddings are built once, and a clip that is scheduled in part is decoded for each part, whole."""
    stages = topology(spec, config)
    talker_stage, code2wav_stage = stages["stages"]
    longest_clip = Q * spec.max_response_tokens
    assert talker_stage["max_num_batched_tokens"] >= talker_stage["max_model_len"]
    assert code2wav_stage["max_num_seqs"] == 1, "same codes, same samples: a clip is decoded alone"
    assert code2wav_stage["max_model_len"] >= longest_clip
    assert code2wav_stage["max_num_batched_tokens"] >= code2wav_stage["max_num_seqs"] * longest_clip
    assert code2wav_stage["default_sampling_params"]["max_tokens"] >= longest_clip
    assert stages["enable_chunked_prefill"] is False
    assert stages["enable_prefix_caching"] is False
    assert stages["async_chunk"] is False


@pytest.mark.parametrize("layout", prompts.SLOTS)
@pytest.mark.parametrize("language", ["Auto", "English"])
def test_the_longest_prompt_that_is_let_in_fits_the_talker(config, layout, language):
    text_ids = [1] * SPEC.max_prompt_tokens
    length = prompts.prompt_length(config, layout, text_ids, prompts.language_id(config, language))
    assert length <= SPEC.max_prompt_tokens + PROMPT_MARGIN


def test_settings_of_the_run_reach_both_stages(config):
    spec = replace(SPEC, attention_backend="FLASH_ATTN", frees_memory=True, executor=None)
    stages = topology(spec, config)
    talker_stage, code2wav_stage = stages["stages"]
    assert stages["dtype"] == "float32"
    assert "distributed_executor_backend" not in stages
    assert topology(SPEC, config)["distributed_executor_backend"] == "uni"
    assert talker_stage["attention_config"] == {"backend": "FLASH_ATTN"}
    assert talker_stage["logprobs_mode"] == "raw_logprobs"
    for stage in (talker_stage, code2wav_stage):
        assert stage["enable_sleep_mode"] is True
        assert (stage["seed"], stage["gpu_memory_utilization"]) == (7, 0.2)
    assert "enable_sleep_mode" not in topology(SPEC, config)["stages"][0]


def test_the_code_predictor_samples_as_qwen_tts_does(config):
    sampling = topology(SPEC, config)["stages"][TALKER]["subtalker_sampling_params"]
    assert sampling == {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 1.0}


def test_a_model_with_other_codec_ids_than_the_pipelines_is_refused(config):
    module.check_model(config)
    other = config | {"talker_config": config["talker_config"] | {"codec_eos_token_id": 4198}}
    with pytest.raises(CheckpointError, match=r"4198 and 2048; .* works with 2150 and 2048 alone"):
        module.check_model(other)


# ------------------------------------------------------------------------------------------------ requests


class Words:
    """A tokenizer that gives each word, and each end of a line, an id."""

    backend_tokenizer = Tokenizer(models.WordLevel({"?": 7}, unk_token="?"))
    backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|[^\s]+"), "removed", invert=True)


def row(**values) -> PromptRow:
    defaults = {
        "id": "a",
        "text": "one two three",
        "split": "train",
        "index": 0,
        "data_source": "t",
        "ground_truth": "",
    }
    return PromptRow(**(defaults | values))


@pytest.fixture
def speakers(tmp_path, config) -> Path:
    size = config["talker_config"]["hidden_size"]
    for name, value in {"anna": 0.5, "ben": -0.25}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps([value] * size))
    (tmp_path / "short.json").write_text("[0.5]")
    return tmp_path


def test_a_row_is_conditioned_on_its_own_speaker_and_language_and_else_on_the_runs(config, speakers):
    by_row = Conditioner(config, Words(), str(speakers), "English")
    given_row = by_row(row(speaker="ben", language="Auto"))
    assert given_row.speaker_H.tolist() == [-0.25] * config["talker_config"]["hidden_size"]
    assert given_row.speaker_H.dtype == np.float32
    assert (given_row.language, given_row.language_id) == ("Auto", None)
    assert len(given_row.text_ids) == prompts.ROLE_TOKENS + 3 + prompts.CLOSING_TOKENS
    by_run = Conditioner(config, Words(), str(speakers / "anna.json"), "English")(row())
    assert by_run.speaker_H[0] == 0.5
    assert by_run.language_id == prompts.language_id(config, "english")


def test_an_embedding_is_read_once(config, speakers):
    conditioner = Conditioner(config, Words(), str(speakers), "Auto")
    first = conditioner(row(speaker="anna")).speaker_H
    (speakers / "anna.json").unlink()
    assert conditioner(row(speaker="anna", id="b")).speaker_H is first


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"speaker": "carl"}, DataError, r"carl\.json does not exist"),
        ({"speaker": "short"}, DataError, r"has 1 values"),
        ({"speaker": None}, DataError, "is a folder"),
        ({"speaker": "../anna"}, DataError, "plain name"),
        ({"speaker": "anna", "language": "Klingon"}, ConfigError, "Unknown language 'Klingon': .*Auto"),
    ],
)
def test_an_unknown_speaker_or_language_is_named(config, speakers, values, error, message):
    with pytest.raises(error, match=message):
        Conditioner(config, Words(), str(speakers), "Auto")(row(**values))


@pytest.mark.parametrize("layout", prompts.SLOTS)
@pytest.mark.parametrize(("language", "tags"), [("Auto", 3), ("English", 4)])
@given(words=st.integers(1, 40))
def test_a_request_has_a_placeholder_for_each_position_of_the_prompt(config, layout, language, tags, words):
    text_ids = list(range(prompts.ROLE_TOKENS + words + prompts.CLOSING_TOKENS))
    speaker_H = np.full(config["talker_config"]["hidden_size"], 0.1, np.float64)
    asked = request(config, layout, text_ids, speaker_H, language)
    speaker, text_start, text_end, start = 1, 1, 1, 1
    text = words + text_end if layout == "non_streaming" else 0
    expected = prompts.ROLE_TOKENS + tags + speaker + text_start + text + start
    assert asked["prompt_token_ids"] == [config["talker_config"]["codec_pad_id"]] * expected
    told = asked["additional_information"]
    assert told["_qwen3_tts_text_ids"] == [text_ids]
    assert told["language"] == [language]
    assert told["non_streaming_mode"] == [layout == "non_streaming"]
    assert told["x_vector_only_mode"] == [True]
    embedding = told["voice_clone_prompt"][0]
    assert embedding == {"ref_spk_embedding": [float(np.float32(0.1))] * len(speaker_H), "icl_mode": False}


def test_a_request_of_an_unknown_language_or_layout_is_refused(config):
    text_ids, speaker_H = list(range(12)), np.zeros(4)
    with pytest.raises(ConfigError, match="Unknown language 'Elvish'"):
        request(config, "streaming", text_ids, speaker_H, "Elvish")
    with pytest.raises(ConfigError, match="Unknown prompt layout 'sideways'"):
        request(config, "sideways", text_ids, speaker_H, "Auto")
