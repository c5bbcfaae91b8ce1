#!/usr/bin/env bash
# The published launcher on a tiny-random checkpoint, with fixtures made here and a reward that needs no server:
# two updates, then it is over. Finds the platform by itself; on GPUs: NUM_GPUS=2 bash run_qwen3_tts_grpo_smoke.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHON_BIN=${PYTHON_BIN:-python3}
if [[ -z "${WORK_DIR:-}" ]]; then
  WORK_DIR=$(mktemp -d)
  trap 'rm -rf "$WORK_DIR"' EXIT
fi

"$PYTHON_BIN" -m verl_tts.commands tiny "$WORK_DIR/model"
"$PYTHON_BIN" -m verl_tts.data.quickstart "$WORK_DIR/data" --model "$WORK_DIR/model"

export MODEL_PATH=$WORK_DIR/model TRAIN_FILE=$WORK_DIR/data/train.parquet VAL_FILE=$WORK_DIR/data/val.parquet
export SPK_EMBED_PATH=$WORK_DIR/data/speaker.json SCORER_URL=null OUTPUT_DIR=$WORK_DIR/run NUM_GPUS=${NUM_GPUS:-1}
export TOTAL_TRAINING_STEPS=2 TEST_FREQ=-1 SAVE_FREQ=-1 RESUME_MODE=disable
bash "$root/examples/grpo_trainer/qwen3_tts/run_qwen3_tts_grpo.sh" \
  reward.custom_reward_function.path=pkg://verl_tts.rewards.functions \
  reward.custom_reward_function.name=duration \
  data.max_prompt_length=192 \
  data.max_response_length=48 \
  trainer.val_before_train=false \
  trainer.log_val_generations=0 \
  "$@"

last_step=$(tail -n 1 "$OUTPUT_DIR/metrics.jsonl" | "$PYTHON_BIN" -c 'import json; print(json.loads(input())["step"])')
[[ "$last_step" == 2 ]] || { echo "the last step is $last_step, not 2" >&2; exit 1; }
