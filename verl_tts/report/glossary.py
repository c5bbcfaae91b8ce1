"""What each number of a run means and where it is healthy: the words of the report and of docs/reading_a_run.md.

The tables of the document are these, checked by tests/unit/report/test_glossary.py; the document has the reasons.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Meaning:
    "``pattern`` is a name in metrics.jsonl, ``*`` stands for any text; ``is_charted``: the report draws it."

    pattern: str
    text: str
    healthy: str
    is_charted: bool = False


METRICS = (
    # rewards
    Meaning(
        "reward/mean",
        "Mean reward of the step's clips.",
        "rises slowly; each step has other prompts, so it is noisy",
        True,
    ),
    Meaning(
        "reward/std", "Spread of the rewards of a step.", "well above 0; it may narrow as the policy gets better", True
    ),
    Meaning(
        "reward/flat_group_rate",
        "Share of groups whose clips all got the same reward: they teach nothing.",
        "below 0.2",
        True,
    ),
    Meaning(
        "reward/violation_rate",
        "Share of clips that a guard or a gate turned down.",
        "below 0.05 for a trained model, and falling",
        True,
    ),
    Meaning(
        "reward/parts/*",
        ("Mean of a part: what guards measured (clip/), guards that struck (guard/), what the scorer answered."),
        "as the part says; a rising total with one part falling is a trade",
    ),
    Meaning("critic/score/*", "verl's own count of the rewards: mean, max, min.", "as reward/mean"),
    Meaning("critic/rewards/*", "The same after penalties; equal without any.", "as reward/mean"),
    Meaning(
        "critic/advantages/*",
        "Rewards relative to their group, which is what trains.",
        "mean near 0, extremes within about 3",
    ),
    Meaning("critic/returns/*", "Equal to the advantages in GRPO.", "as critic/advantages"),
    # rollouts
    Meaning(
        "rollout/eos_rate",
        "Share of clips that ended by themselves.",
        "above 0.95 for a trained model; a fall says that it babbles on",
        True,
    ),
    Meaning("rollout/frames/mean", "Mean length of a clip in codec frames.", "steady, about what the texts need", True),
    Meaning("rollout/frames/max", "Longest clip in frames.", "below data.max_response_length"),
    Meaning("rollout/audio_s", "Seconds of audio that the step sampled.", "steady"),
    Meaning("rollout/rows_real", "Clips that were trained on.", "train_batch_size times rollout.n"),
    Meaning("rollout/groups_dropped", "Groups left out because a rollout failed.", "0", True),
    Meaning(
        "response_length*/*",
        "verl's lengths in tokens; clip_ratio is the share that reached the limit.",
        "clip_ratio below 0.05 for a trained model",
    ),
    Meaning("response/aborted_ratio", "Share of rollouts that were broken off.", "0"),
    Meaning(
        "prompt_length/*",
        "Lengths of the prompts in tokens; clip_ratio counts the longest.",
        "below data.max_prompt_length",
    ),
    Meaning("num_turns/*", "verl's count of messages.", "2"),
    Meaning("rollout/real_share", "Share of the prompts asked for that are trained on.", "1"),
    Meaning("rollout/frames_per_char", "Frames for a character of the text.", "steady", True),
    Meaning("rollout/identical_rate", "Share of clips that equal a sibling, sample for sample.", "0"),
    Meaning("rollout/tokens", "Codec tokens that the step sampled.", "steady"),
    # the policy
    Meaning(
        "actor/kl_loss",
        "Distance from the policy that the run began with, per token.",
        "rises and levels off, below about 0.1 on a trained model; with a tiny one it means little",
        True,
    ),
    Meaning("actor/kl_coef", "beta, the weight of that distance in the loss.", "as set"),
    Meaning(
        "actor/grad_norm",
        "Norm of the gradient before it is clipped.",
        "same order throughout; a jump tenfold comes before a collapse",
        True,
    ),
    Meaning(
        "actor/entropy",
        "How undecided the policy is, nats a token.",
        "falls slowly; a plunge is a collapse, a climb is noise",
        True,
    ),
    Meaning(
        "actor/pg_clipfrac*",
        "Share of tokens whose ratio was clipped.",
        "0 with one update a batch, below 0.1 with several",
    ),
    Meaning(
        "actor/ppo_kl",
        "Distance between the policy that sampled and the one that is updated.",
        "near 0 with one update a batch",
    ),
    Meaning(
        "actor/pg_loss", "The policy gradient's part of the loss.", "near 0: its value says nothing, its gradient does"
    ),
    Meaning("actor/loss", "What is minimised: pg_loss plus beta times kl_loss.", "none; read its two parts"),
    Meaning("actor/lr", "Learning rate.", "as set, after the warm-up"),
    Meaning("actor/perf/*", "Memory of the actor, GB.", "below what the device has"),
    # agreement of engine and actor
    Meaning(
        "gate/logprob_max_abs",
        "Largest difference between engine and actor about one token, nats.",
        "below 0.05 in BF16, 1e-4 in FP32; tts.gates stops the run at its limit",
        True,
    ),
    Meaning("gate/logprob_mean_abs", "The same, mean over tokens.", "below 0.01 in BF16", True),
    Meaning("gate/logprob_correlation", "Correlation of the two.", "above 0.999"),
    Meaning(
        "gate/outside_support", "Share of sampled tokens that the actor's own truncation would not allow.", "below 0.01"
    ),
    Meaning("gate/reference_mean_abs", "Mean difference of engine and reference, nats.", "grows with actor/kl_loss"),
    Meaning(
        "gate/nearer_reference",
        "The engine's distance from the actor over that from the reference.",
        "1 at first, then below: above 1 the engine holds old weights",
    ),
    Meaning("gate/weights_unchanged", "1 where an update left the engine's weights as they were.", "0"),
    Meaning("gate/length_drift", "Frames a character over those of the first step, or the inverse.", "below 1.5"),
    Meaning("gate/kl", "Nats a token between the policy that sampled and the reference.", "below 0.5"),
    Meaning("gate/first_ratio", "Largest distance of a ratio from 1 before an update's first step.", "near 0"),
    Meaning("gate/warned", "Gates beyond their warning level.", "0", True),
    Meaning("gate/in_a_row", "Steps in a row that a gate has been beyond its stop level.", "0"),
    Meaning("sync/behind", "Updates since the one whose weights the clips are of.", "0; below tts.sync_every"),
    Meaning("sync/*", "Engines, tensors that each of them holds, and whether their checksum changed.", "changed 1"),
    Meaning("training/rollout_*", "verl's comparison of the same probabilities.", "correlation above 0.999"),
    Meaning("rollout_corr/*", "verl's measures of how far off-policy the samples are.", "kl near 0, ppl_ratio near 1"),
    Meaning(
        "training/off_policy/trajectory_staleness/mean",
        "Updates between the weights that sampled and those that are trained.",
        "0; tts.sync_every - 1 at most",
        True,
    ),
    Meaning("training/off_policy/*", "verl's other counts of the same.", "staleness 0, spans 1"),
    Meaning("training/*", "Step, epoch and messages as verl counts them.", "as set"),
    # validations
    Meaning(
        "val-core/*",
        "The score of a validation, for each data source; mean@k over k clips a prompt.",
        "rises with its interval clear of step 0",
    ),
    Meaning(
        "val-aux/*",
        "The parts of a validation, as verl averages them: a part that was not measured counts nowhere.",
        "as the part says",
    ),
    Meaning(
        "val-mean/*",
        "Score, EOS and parts over all prompts, each counting once: what the best checkpoint is chosen by.",
        "the score up, an error rate not above step 0",
    ),
    Meaning(
        "val-probe/*",
        "Held-out probes: mean, change since the first validation, its noise, the rows, the alarm.",
        "alarm 0",
    ),
    Meaning("val-scorer/*", "How the scorer served the validation.", "retries 0"),
    # time
    Meaning(
        "reward/scorer/*",
        "How the scorer served the step: requests, latencies, retries, seconds of waiting as told.",
        "retries 0; latency well below timing_s/gen",
    ),
    Meaning(
        "timing_s/*",
        "Seconds of each phase; step is the whole.",
        "gen is most of it; anything else that is, is worth a look",
    ),
    Meaning("timing_per_token_ms/*", "The same by tokens.", "steady"),
    Meaning(
        "speed/*",
        "Steps an hour, clips and seconds of audio a second, tokens a second of the update, GPU hours so far.",
        "steady",
    ),
    Meaning("share/*", "Share of each phase in the time of the step, its validation included.", "rollout most of it"),
    Meaning("perf/*", "verl's throughput: tokens a second and process, seconds a step, share of peak FLOPS.", "steady"),
    Meaning("global_seqlen/*", "Tokens of prompt and response, by worker.", "minmax_diff small against mean"),
)

MEANINGS = {
    "score": "What the run optimises.",
    "eos": "Share of clips that ended by themselves; healthy above 0.95.",
    "cer": "Character error rate; healthy below 0.1, and not above where it began.",
    "wer": "Word error rate; above 0.3 raise beta or lower the learning rate.",
    "clip/seconds": "Length of a clip.",
    "clip/rms": "Loudness; a steady drift is a policy that found out what the scorer likes.",
    "clip/silence_share": "Share of silent windows; healthy from 0.1 to 0.5 in speech.",
    "clip/trailing_silence_s": "Silence at the end; healthy below 1 s.",
    "clip/seconds_per_letter": "Pace; English speech takes 0.05 to 0.1.",
    "clip/repeated_share": "Repeated 4-grams of codes; a rise is babbling.",
    "guard/truncated": "Share cut off at the limit; healthy below 0.05.",
}

TEXTS = {
    "reminder": (
        "What this page can and cannot show. A smoke test or a short run is no evidence of better speech, and "
        "neither is a score alone: a policy learns to please its scorer. Evidence is the whole fixed validation "
        "curve, probes that were never optimised, and paired blind listening: verl-tts listen."
    ),
    "curves": (
        "Every validation asks the same prompts with the same seeds. Where the dark band leaves the dashed line, the "
        "change since the first validation is beyond chance."
    ),
    "grid": "Nobody chose these for how they sound.",
    "distributions": (
        "A mean hides a tail. Look for a second hump, for clips at the length limit, and for an error rate that "
        "rose for a few."
    ),
    "probes": (
        "Other scorers, asked in validations and never optimised. The alarm is given where the score rose and a probe "
        "fell by more than its noise, two standard errors over the prompts: the policy pleases its scorer and does not "
        "speak better."
    ),
    "training": (
        "Each step has other prompts, so these are noisy; look for trends and jumps, and take the verdict from "
        "validations."
    ),
    "throughput": (
        "Phases that run side by side or inside one another are each counted, and testing and saving are not part of "
        "every step, so the column does not sum to 100."
    ),
}

NO_PROBES = (
    "A score alone cannot tell better speech from a policy that pleases its scorer: name held-out scorers in "
    "tts.reward.probes."
)

# What is seen, and what to change first; one thing at a time.
ADVICE = (
    (
        "WER or CER above 0.3, or rising while the score rises",
        (
            "raise beta (actor_rollout_ref.actor.kl_loss_coef, twice) or halve the learning rate; then give "
            "the error rate more weight, or a gate"
        ),
    ),
    (
        "the voice drifts from the speaker while emotion or style improves, or the other way round",
        (
            "move weight between the two parts by 0.1 at a time (tts.reward.compose.weights), and listen: no "
            "number decides this"
        ),
    ),
    (
        "many flat groups",
        (
            "prompts are too easy, too hard or the score too coarse: raise rollout.n or the temperature, drop"
            " prompts that all clips solve, use a score with more steps"
        ),
    ),
    (
        "staleness above 0, or the log-prob gap grows",
        "tts.sync_every=1; then check precision: FP32 on both sides agrees to 1e-4",
    ),
    (
        "EOS gets rarer, clips grow to the limit",
        "tts.reward.guards.penalise_truncation=true; then a limit on seconds per letter",
    ),
    (
        "the score rises and a probe falls",
        "stop at the checkpoint before; raise beta, and put what the probe hears into the reward",
    ),
    ("nothing moves", "look at reward/std and flat groups first, then double the learning rate; 100 updates are few"),
    (
        "kl_loss climbs without end, entropy plunges",
        "halve the learning rate, raise beta; go back to a checkpoint before the climb",
    ),
)


def meaning_of(metric: str) -> Meaning | None:
    """The first that matches."""
    return next((meaning for meaning in METRICS if fnmatchcase(metric, meaning.pattern)), None)
