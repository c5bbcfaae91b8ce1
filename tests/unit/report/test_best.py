"""The best step is the highest score among those that got nothing worse that must not."""

from verl_tts.report.best import best_step, validation_means


def line(step: int, score: float | None = None, **parts: float) -> dict:
    values = {"step": step, "reward/mean": 9.0}
    if score is not None:
        values["val-core/hindi/reward/mean@1"] = score
    return values | {f"val-aux/hindi/whisper/{name}/mean@1": value for name, value in parts.items()}


def test_the_highest_score_wins_and_of_equals_the_earliest():
    assert best_step([line(0, 0.1), line(10, 0.5), line(15), line(20, 0.5), line(30, 0.3)], []) == 10


def test_a_step_whose_error_rate_is_above_the_first_one_does_not_count():
    lines = [line(0, 0.1, cer=0.2), line(10, 0.4, cer=0.2), line(20, 0.9, cer=0.21)]
    assert best_step(lines, ["cer"]) == 10
    assert best_step(lines, []) == 20


def test_a_constraint_that_no_validation_reports_is_none():
    assert best_step([line(0, 0.1), line(10, 0.4)], ["cer"]) == 10


def test_where_every_later_step_is_worse_the_first_is_best():
    assert best_step([line(0, 0.1, cer=0.2), line(10, 0.4, cer=0.3)], ["cer"]) == 0


def test_only_steps_that_are_there_are_looked_at_and_measured_from_the_first_validation():
    lines = [line(0, 0.1, cer=0.2), line(10, 0.4, cer=0.1), line(20, 0.3, cer=0.15), line(30, 0.9, cer=0.3)]
    assert best_step(lines, ["cer"], among=[20, 30]) == 20
    assert best_step(lines, ["cer"], among=[30]) is None


def test_without_a_validation_there_is_no_best():
    assert best_step([line(1), line(2)], []) is None
    assert best_step([], []) is None


def test_means_are_over_sources_and_only_of_means():
    values = {
        "val-core/hindi/reward/mean@4": 0.5,
        "val-core/google/fleurs/reward/mean@4": 0.25,
        "val-core/hindi/reward/best@4/mean": 0.9,
        "val-aux/hindi/CER/mean@4": 0.1,
        "val-aux/hindi/none/mean@4": None,
    }
    assert validation_means(values) == {"reward": 0.375, "cer": 0.1}
