#!/usr/bin/env bash
# Before and after: the model that the run began with and a checkpoint of it, on the validation prompts, by one scorer.
#   bash recipes/hindi_sft_lora/evaluate.sh                               the newest checkpoint of OUTPUT_DIR
#   SAMPLES=8 bash recipes/hindi_sft_lora/evaluate.sh runs/hindi/checkpoints/global_step_200
# What follows the checkpoint is an override. The settings are those of the launcher. Cut off, it goes on where it was.
# EVALUATIONS is where both are kept (WORK/evaluations), SAMPLES how many clips a row (4); SCORER_URL as for train.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=${WORK:-outputs/hindi}
export PYTHON_BIN=${PYTHON_BIN:-python3} OUTPUT_DIR=${OUTPUT_DIR:-outputs/qwen3_tts_hindi_grpo}
export MODEL_PATH=${MODEL_PATH:-$work/model} SPK_EMBED_PATH=${SPK_EMBED_PATH:-$work/speaker.json}
export TRAIN_FILE=${TRAIN_FILE:-$work/data/train.parquet} VAL_FILE=${VAL_FILE:-$work/data/validation.parquet}
source "$root/recipes/hindi_sft_lora/scorer.sh"

checkpoint=${1:-$(ls -d "$OUTPUT_DIR"/checkpoints/global_step_* 2>/dev/null | sort -V | tail -n 1 || true)}
[[ -d "$checkpoint" ]] || { echo "evaluate.sh: no checkpoint ${checkpoint:-in $OUTPUT_DIR/checkpoints}; train first, or name one" >&2; exit 2; }
overrides=("${@:2}")
evaluations=${EVALUATIONS:-$work/evaluations}

[[ -n "${SCORER_URL:-}" ]] || start_scorer 1
keep_gpus 1
mkdir -p "$evaluations"
settings=$evaluations/settings.yaml
bash "$root/examples/grpo_trainer/qwen3_tts/run_qwen3_tts_hindi_grpo.sh" --dry-run >"$settings"

evaluate() { # policy, name, further words
  attend "$PYTHON_BIN" -m verl_tts.commands evaluate "$1" --data "$VAL_FILE" --config "$settings" \
    --scorer-url "$SCORER_URL" --samples "${SAMPLES:-4}" --out "$evaluations/$2" "${@:3}" \
    ${overrides[@]:+--set "${overrides[@]}"}
}
evaluate "$MODEL_PATH" before
evaluate "$checkpoint" "$(basename "$checkpoint")" --against "$evaluations/before"
