#!/usr/bin/env bash
# Before and after: the model that the run began with and a checkpoint of it, on the validation prompts, by one scorer.
#   bash recipes/hindi_sft_lora/evaluate.sh                               the newest checkpoint of OUTPUT_DIR
#   SAMPLES=8 bash recipes/hindi_sft_lora/evaluate.sh runs/hindi/checkpoints/global_step_200
# What follows the checkpoint is an override. The settings are those of the run. Cut off, it goes on where it was.
# VAL_FILE names other prompts than those that the run was validated with.
# EVALUATIONS is where both are kept (WORK/evaluations), SAMPLES how many clips a row (4); SCORER_URL as for train.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=${WORK:-outputs/hindi}
export PYTHON_BIN=${PYTHON_BIN:-python3} OUTPUT_DIR=${OUTPUT_DIR:-outputs/qwen3_tts_hindi_grpo}
source "$root/recipes/hindi_sft_lora/scorer.sh"
source "$root/recipes/run.sh"

checkpoint=${1:-$(newest_checkpoint "$OUTPUT_DIR")}
[[ -d "$checkpoint" ]] || { echo "evaluate.sh: no checkpoint ${checkpoint:-in $OUTPUT_DIR/checkpoints}; train first, or name one" >&2; exit 2; }
overrides=("${@:2}")
evaluations=${EVALUATIONS:-$work/evaluations}

mkdir -p "$evaluations"
settings=$evaluations/settings.yaml
said=$(settings_of_run "$checkpoint" "$settings")
mapfile -t of_run <<<"$said"
prompts=${VAL_FILE:-${of_run[2]:-}}
[[ -n "$prompts" ]] || { echo "evaluate.sh: the run was validated with several files: name one as VAL_FILE" >&2; exit 2; }
[[ -n "${SCORER_URL:-}" ]] || start_scorer 1
keep_gpus 1

evaluate() { # policy, name, further words
  attend "$PYTHON_BIN" -m verl_tts.commands evaluate "$1" --data "$prompts" --config "$settings" \
    --scorer-url "$SCORER_URL" --samples "${SAMPLES:-4}" --out "$evaluations/$2" "${@:3}" \
    ${overrides[@]:+--set "${overrides[@]}"}
}
evaluate "${of_run[0]}" before
evaluate "$checkpoint" "$(basename "$checkpoint")" --against "$evaluations/before"
