"""How the log-probs of channels become one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.config.tts import REDUCTIONS, TTSConfig
from verl_tts.errors import ConfigError
from verl_tts.models.channels import channel_weights

sampled = st.integers(1, 32).flatmap(
    lambda books: st.lists(st.lists(st.booleans(), min_size=1 + books, max_size=1 + books), min_size=1, max_size=9)
).map(np.array)  # fmt: skip


@given(st.sampled_from(REDUCTIONS), sampled)
def test_what_was_not_sampled_weighs_nothing(reduction, sampled_TC):
    weights_TC = channel_weights(reduction, "1,32", sampled_TC)
    assert (weights_TC[~sampled_TC] == 0).all()
    assert np.isfinite(weights_TC).all()
    assert (weights_TC >= 0).all()


@given(st.sampled_from(["mean", "weighted"]), sampled)
def test_weights_of_a_mean_sum_to_one_where_there_is_an_action(reduction, sampled_TC):
    total_T = channel_weights(reduction, "1,32", sampled_TC).sum(axis=1)
    assert np.allclose(total_T, sampled_TC.any(axis=1))


def test_the_weights_of_each_reduction():
    all_1C = np.ones((1, 17), bool)
    assert channel_weights("sum", "1,32", all_1C).tolist() == [[1.0] * 17]
    assert np.allclose(channel_weights("mean", "1,32", all_1C), 1 / 17)
    assert np.allclose(channel_weights("weighted", "1,32", all_1C)[0], [1 / 33, *[2 / 33] * 16])
    assert channel_weights("codebook0", "1,32", all_1C).tolist() == [[1.0, 1.0, *[0.0] * 15]]
    assert np.allclose(channel_weights("weighted", "1,32", np.ones((1, 33), bool)), 1 / 33), "equal for 32 codebooks"


@pytest.mark.parametrize("weights", ["1", "1,2,3", "a,b", "-1,2", "1,0", "1,inf", "nan,1"])
def test_weights_that_are_no_two_numbers_are_refused(weights):
    with pytest.raises(ConfigError, match=r"tts\.channel_weights="):
        TTSConfig(channel_weights=weights)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ConfigError, match=r"tts\.channel_reduction=median is unknown"):
        TTSConfig(channel_reduction="median")
    with pytest.raises(ConfigError, match=r"tts\.channel_reduction=median is unknown"):
        channel_weights("median", "1,32", np.ones((1, 17), bool))
