from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.data.schema import is_speakable, row_from_verl, to_columns, to_prompt_row
from verl_tts.errors import DataError
from verl_tts.types import PromptRow

ROW = {
    "data_source": "demo",
    "prompt": [{"role": "user", "content": "नमस्ते दुनिया"}],
    "ability": "text_to_speech",  # published files have it; nobody reads it
    "reward_model": {"style": "model", "ground_truth": "नमस्ते दुनिया"},
    "extra_info": {"id": "hi-7", "split": "train", "index": 7, "target_seconds": 1.5, "emotion": None, "text": "x"},
}


def test_a_row_is_read_as_it_was_written():
    assert to_prompt_row(ROW) == PromptRow(
        id="hi-7", text="नमस्ते दुनिया", split="train", index=7, data_source="demo", ground_truth="नमस्ते दुनिया",
        extra={"target_seconds": 1.5, "text": "x"},
    )  # fmt: skip


def test_the_columns_that_verl_hands_to_an_agent_loop_are_the_same_row():
    raw_prompt = np.array(ROW["prompt"], dtype=object)
    columns = {name: value for name, value in ROW.items() if name != "prompt"}
    assert row_from_verl({**columns, "raw_prompt": raw_prompt, "index": 7, "uid": "u"}) == to_prompt_row(ROW)


@given(
    st.builds(
        PromptRow,
        id=st.text(min_size=1), text=st.text().filter(is_speakable), split=st.sampled_from(["train", "val"]),
        index=st.integers(0, 1 << 40), data_source=st.text(min_size=1), ground_truth=st.text(min_size=1),
        language=st.none() | st.just("English"), speaker=st.none() | st.just("asha"),
        extra=st.fixed_dictionaries({}, optional={"target_seconds": st.floats(0.1, 9), "loud": st.booleans()}),
    )
)  # fmt: skip
def test_columns_and_row_are_inverse_to_each_other(row):
    assert to_prompt_row(to_columns(row)) == row


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("prompt",), "hello", "one user turn"),
        (("prompt",), [], "one user turn"),
        (("prompt",), [*ROW["prompt"], *ROW["prompt"]], "one user turn"),
        (("prompt", 0, "role"), "assistant", "one user turn"),
        (("prompt", 0, "content"), ["hello"], "has to be a text"),
        (("prompt", 0, "content"), " \u200b\n", "no letter or digit"),
        (("prompt", 0, "content"), "...!?। ", "no letter or digit"),
        (("prompt", 0, "content"), "", "is empty"),
        (("reward_model",), None, "reward_model has to be a struct"),
        (("reward_model", "ground_truth"), None, "ground_truth has to be a text, but is missing"),
        (("reward_model", "style"), 1, "style has to be a text"),
        (("extra_info", "id"), None, "id has to be a text, but is missing"),
        (("extra_info", "id"), 7, "id has to be a text, but is 7"),
        (("extra_info", "index"), 7.5, "index has to be a whole number"),
        (("extra_info", "index"), True, "index has to be a whole number"),
        (("extra_info", "target_seconds"), "long", "target_seconds has to be a number"),
        (("extra_info", "target_seconds"), -1.0, "above 0"),
        (("extra_info", "target_seconds"), float("nan"), "not finite"),
        (("extra_info", "codes"), [[1, 2], [3, 4]], "codes has to be a text, a number or a bool"),
        (("extra_info", "language"), 5, "language has to be a text"),
        (("data_source",), "", "data_source is empty"),
    ],
)
def test_a_bad_row_is_refused_with_the_field_and_its_value(path, value, message):
    row = deepcopy(ROW)
    node = row
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    with pytest.raises(DataError, match=message):
        to_prompt_row(row)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(DataError) as refused:
        to_prompt_row({**ROW, "prompt": "long " * 1000})
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("text", ["a", "7", "क", "你好", "e\u0301", "— yes —"])
def test_a_letter_or_digit_of_any_script_is_enough_to_speak(text):
    assert is_speakable(text)
