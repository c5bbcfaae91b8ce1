#!/usr/bin/env bash
# The whole loop on a machine with nothing: a tiny-random policy, prompts from the package, a scorer server and a few
# updates, by the same launcher that a real run uses. Everything after the script's name is an override.
#   STEPS=40 bash examples/quickstart.sh        PLATFORM=cuda bash examples/quickstart.sh
#   MODEL=moss bash examples/quickstart.sh      (default: qwen3_tts)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PYTHON_BIN=${PYTHON_BIN:-python3}
policy=${MODEL:-qwen3_tts}
work=outputs/quickstart
case $policy in
  qwen3_tts) recipe=tiny own=() ;;
  # An answer has Q + 2 positions more than frames, and a prompt is mostly template.
  moss) work+=/moss recipe=tiny_moss own=(data.max_response_length=64 data.max_prompt_length=384) ;;
  *) echo "quickstart: MODEL=$policy is unknown; it has to be qwen3_tts or moss" >&2; exit 2 ;;
esac
steps=${STEPS:-4}
export OUTPUT_DIR=${OUTPUT_DIR:-$work/run-$(date +%Y%m%d-%H%M%S)}

# Built once, and again when its recipe is newer.
if [[ ! $work/model -nt verl_tts/checkpoints/tiny.py || ! $work/model -nt verl_tts/checkpoints/$recipe.py ]]; then
  rm -rf "$work/model"
  "$PYTHON_BIN" -m verl_tts.commands tiny --model "$policy" "$work/model"
fi
"$PYTHON_BIN" -m verl_tts.data.quickstart "$work/data" --model "$work/model"

children=()
stop() {
  kill "${children[@]}" 2>/dev/null || true
  wait "${children[@]}" || true
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The scorer takes a free port and says which: "scorer duration listening on http://127.0.0.1:40123".
exec {scorer_says}< <(exec "$PYTHON_BIN" -m verl_tts.commands score --scorer duration --port 0)
children+=($!)
read -r address <&"$scorer_says" || { echo "quickstart: the scorer did not start" >&2; exit 3; }
echo "$address"

export MODEL_PATH=$work/model TRAIN_FILE=$work/data/train.parquet VAL_FILE=$work/data/val.parquet
export SPK_EMBED_PATH=$work/data/speaker.json SCORER_URL=${address##* }/score NUM_GPUS=${NUM_GPUS:-1}
export TOTAL_TRAINING_STEPS=$steps TEST_FREQ=$steps SAVE_FREQ=$steps RESUME_MODE=disable
bash examples/grpo_trainer/qwen3_tts/run_qwen3_tts_grpo.sh \
  tts.platform="${PLATFORM:-cpu}" \
  data.max_prompt_length=256 \
  data.max_response_length=48 \
  actor_rollout_ref.actor.optim.lr=1.0e-3 \
  actor_rollout_ref.actor.optim.lr_warmup_steps=0 \
  "${own[@]}" "$@" &
children+=($!)
wait $!

cat <<END

metrics     $OUTPUT_DIR/metrics.jsonl, one line a step
audio       $OUTPUT_DIR/samples/val/, before and after; texts and scores are in each samples.jsonl
checkpoint  $OUTPUT_DIR/checkpoints/global_step_$steps
export it   $PYTHON_BIN -m verl_tts.commands export $OUTPUT_DIR/checkpoints/global_step_$steps DIRECTORY
END
