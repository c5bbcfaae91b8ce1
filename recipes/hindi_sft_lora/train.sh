#!/usr/bin/env bash
# The run, on what prepare.sh has left in WORK. Everything after the script's name is an override.
#   bash recipes/hindi_sft_lora/train.sh
#   SCORER_URL=http://HOST:PORT/score bash recipes/hindi_sft_lora/train.sh tts.output_dir=runs/hindi
# Without SCORER_URL a Whisper scorer is started on SCORER_GPU and ended with the run: see scorer.sh.
# MODEL_PATH, TRAIN_FILE and the other variables of run_qwen3_tts_grpo.sh win over what is in WORK.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=${WORK:-outputs/hindi}
export PYTHON_BIN=${PYTHON_BIN:-python3} NUM_GPUS=${NUM_GPUS:-2}
export MODEL_PATH=${MODEL_PATH:-$work/model} SPK_EMBED_PATH=${SPK_EMBED_PATH:-$work/speaker.json}
export TRAIN_FILE=${TRAIN_FILE:-$work/data/train.parquet} VAL_FILE=${VAL_FILE:-$work/data/validation.parquet}
source "$root/recipes/hindi_sft_lora/scorer.sh"
source "$root/recipes/run.sh"

for place in "$MODEL_PATH" "$SPK_EMBED_PATH" "$TRAIN_FILE" "$VAL_FILE"; do
  require "$place" "prepare.sh makes it, in WORK=$work"
done
[[ -n "${SCORER_URL:-}" ]] || start_scorer "$NUM_GPUS"
keep_gpus "$NUM_GPUS"
attend bash "$root/examples/grpo_trainer/qwen3_tts/run_qwen3_tts_hindi_grpo.sh" "$@"
