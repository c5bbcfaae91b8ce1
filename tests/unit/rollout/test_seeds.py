"""Seeds: one per sample, by what identifies the sample; nothing else plays a part."""

from hypothesis import given
from hypothesis import strategies as st

from verl_tts.rollout.seeds import SEED_BITS, sample_seed, stream_seed

text = st.text(max_size=12)
number = st.integers(0, 2**31)


@given(number, text, text, number, st.none() | number)
def test_a_seed_is_always_the_same_and_fits_where_numbers_are_doubles(run_seed, split, row_id, sample, step):
    seed = sample_seed(run_seed, split, row_id, sample, step)
    assert seed == sample_seed(run_seed, split, row_id, sample, step)
    assert 0 <= seed < 2**SEED_BITS < 2**53
    assert all(0 <= stream_seed(seed, stream) < 2**SEED_BITS for stream in ("codebook0", "residual"))


def test_seeds_are_those_of_earlier_runs():
    """A changed hash would make every samples.jsonl that was written impossible to replay."""
    assert sample_seed(42, "train", "hi-00000007", 3, 12) == 124112690422161
    assert stream_seed(124112690422161, "codebook0") == 169337404019561
    assert stream_seed(124112690422161, "residual") == 38198513147973


def test_each_part_of_a_samples_identity_changes_its_seed():
    base = {"run_seed": 1, "split": "train", "row_id": "a", "sample": 0, "step": 1}
    others = [{"run_seed": 2}, {"split": "val"}, {"row_id": "b"}, {"sample": 1}, {"step": 2}, {"step": None}]
    seeds = {sample_seed(**(base | other)) for other in [{}, *others]}
    assert len(seeds) == 1 + len(others)


def test_parts_do_not_run_into_each_other():
    assert sample_seed(1, "train", "a", 11, 1) != sample_seed(1, "train", "a", 1, 11)
    assert sample_seed(1, "train", "a1", 1, 1) != sample_seed(1, "train", "a", 11, 1)


def test_seeds_of_a_run_do_not_collide():
    seeds = [
        sample_seed(42, "train", f"row-{row}", k, step) for row in range(50) for k in range(8) for step in range(25)
    ]
    streams = [stream_seed(seed, stream) for seed in seeds for stream in ("codebook0", "residual")]
    assert len({*seeds, *streams}) == 3 * len(seeds)


@given(number, text, st.integers(0, 63))
def test_a_validation_draws_the_same_noise_at_every_step(run_seed, row_id, sample):
    """There is no step in its seed; a training step 0 is something else."""
    validation = sample_seed(run_seed, "val", row_id, sample, None)
    assert validation == sample_seed(run_seed, "val", row_id, sample, None)
    assert validation != sample_seed(run_seed, "val", row_id, sample, 0)


@given(st.integers(0, 2**SEED_BITS - 1))
def test_the_two_samplers_of_a_sample_have_streams_of_their_own(seed):
    assert stream_seed(seed, "codebook0") != stream_seed(seed, "residual")
    assert seed not in (stream_seed(seed, "codebook0"), stream_seed(seed, "residual"))
