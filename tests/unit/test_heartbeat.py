"""A run that says nothing says what it is doing, and one that hangs ends."""

import time

from verl_tts.heartbeat import Heartbeat, Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def beating(progress=lambda: None, every_s: float = 30.0, limit_s: float = 100.0):
    said, clock = [], Clock()
    return Heartbeat(said.append, every_s, limit_s, progress, clock), said, clock


def pass_time(heart: Heartbeat, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1
        heart.tick()


def test_a_phase_that_takes_long_says_so_every_thirty_seconds():
    heart, said, clock = beating()
    with heart.phase("the update"):
        pass_time(heart, clock, 70)
    assert [line.text for line in said] == ["still in the update: 30 s", "still in the update: 60 s"]


def test_quick_phases_say_nothing_however_many_there_are():
    heart, said, clock = beating()
    for _ in range(10):
        with heart.phase("the update"):
            pass_time(heart, clock, 20)
    pass_time(heart, clock, 500)
    assert said == []
    assert heart.stalled is None, "between phases nothing can hang"


def test_the_innermost_phase_is_what_the_run_is_doing():
    heart, said, clock = beating()
    with heart.phase("validation"), heart.phase("saving a checkpoint"):
        pass_time(heart, clock, 30)
    assert said[0].text == "still in saving a checkpoint: 30 s"


def test_samples_are_counted_and_the_slowest_is_named():
    heart, said, clock = beating(lambda: Progress(12, 32, "en-3#1", 29.6))
    with heart.phase("rollout and scoring"):
        pass_time(heart, clock, 30)
    assert said[0].text == "still in rollout and scoring: 30 s, 12 of 32 samples, waiting for en-3#1 (30 s)"


def test_a_phase_without_progress_is_stalled_beyond_the_limit():
    heart, _, clock = beating(limit_s=100)
    with heart.phase("the update"):
        pass_time(heart, clock, 100)
        assert heart.stalled is None
        pass_time(heart, clock, 1)
        assert heart.stalled == "the update: 101 s; nothing has moved for 100 s (tts.stall_s)"


def test_a_phase_may_have_a_limit_of_its_own():
    heart, _, clock = beating(limit_s=100)
    with heart.phase("the start of the processes", limit_s=600):
        pass_time(heart, clock, 600)
        assert heart.stalled is None


def test_samples_that_get_done_are_progress_and_their_end_is_a_stall():
    clock_ref: list[Clock] = []
    heart, _, clock = beating(lambda: Progress(min(int(clock_ref[0].now) // 50, 8), 32, "en-3#1", 1.0))
    clock_ref.append(clock)
    with heart.phase("rollout and scoring"):
        pass_time(heart, clock, 499)
        assert heart.stalled is None, "one in fifty seconds is slow, and moves"
        pass_time(heart, clock, 2)
        assert heart.stalled is not None
        assert "8 of 32 samples" in heart.stalled


def test_the_end_of_an_inner_phase_is_progress_of_the_outer_one():
    heart, _, clock = beating(limit_s=100)
    with heart.phase("a step"):
        for _ in range(5):
            with heart.phase("a part"):
                pass_time(heart, clock, 60)
    assert heart.stalled is None


def test_it_beats_on_its_own_thread_until_it_is_stopped():
    said = []
    heart = Heartbeat(said.append, every_s=0.5, limit_s=1e9)
    heart.start()
    with heart.phase("the update"):
        time.sleep(2.5)
    heart.stop()
    assert said
    assert said[0].text.startswith("still in the update")
