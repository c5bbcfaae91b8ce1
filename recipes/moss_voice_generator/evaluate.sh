#!/usr/bin/env bash
# Before and after: the model that the run began with and a checkpoint of it, on the validation prompts, by one scorer.
#   bash recipes/moss_voice_generator/evaluate.sh                               the newest checkpoint of OUTPUT_DIR
#   SAMPLES=8 bash recipes/moss_voice_generator/evaluate.sh runs/moss/checkpoints/global_step_200
# What follows the checkpoint is an override. The settings are those of the launcher. Cut off, it goes on where it was.
# EVALUATIONS is where both are kept (WORK/evaluations), SAMPLES how many clips a row (4); SCORER_URL as for train.sh.
# A run that went on from an adapter (PHASE=v7, LORA_INIT) began with the two merged: EVALUATIONS/start.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=${WORK:-outputs/moss} python=${PYTHON_BIN:-python3}
export PYTHON_BIN=$python OUTPUT_DIR=${OUTPUT_DIR:-outputs/moss_grpo}
export MVG_DIR=${MVG_DIR:-$work/model} CLAP_DIR=${CLAP_DIR:-$work/clap} EMOLIA_DIR=${EMOLIA_DIR:-$work/emolia}
# As train.sh does it: the scorers are those of the run.
if [[ -z "${ASR_DIR:-}" && -d "$work/asr" ]]; then export ASR_DIR=$work/asr; fi
if [[ -z "${ECAPA_DIR:-}" && -d "$work/ecapa" ]]; then export ECAPA_DIR=$work/ecapa; fi
export VAL_FILE=${VAL_FILE:-${DATA_DIR:-$work/data}/validation.parquet}
source "$root/recipes/moss_voice_generator/scorer.sh"

checkpoint=${1:-$(ls -d "$OUTPUT_DIR"/checkpoints/global_step_* 2>/dev/null | sort -V | tail -n 1 || true)}
[[ -d "$checkpoint" ]] || { echo "evaluate.sh: no checkpoint ${checkpoint:-in $OUTPUT_DIR/checkpoints}; train first, or name one" >&2; exit 2; }
overrides=("${@:2}")
evaluations=${EVALUATIONS:-$work/evaluations}

mkdir -p "$evaluations"
[[ -n "${SCORER_URL:-}" ]] || start_scorer "${SCORER_GPU-1}" "$evaluations/scorer"
start=$MVG_DIR
[[ "${PHASE:-}" != v7 ]] || export LORA_INIT=${LORA_INIT:-$work/v1}
if [[ -n "${LORA_INIT:-}" ]]; then
  start=$evaluations/start
  [[ -d "$start" ]] || attend "$python" -m verl_tts.commands merge-lora --base "$MVG_DIR" --adapter "$LORA_INIT" --out "$start"
fi
settings=$evaluations/settings.yaml
bash "$root/recipes/moss_voice_generator/train.sh" --dry-run >"$settings"
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}

evaluate() { # policy, name, further words
  attend "$python" -m verl_tts.commands evaluate "$1" --data "$VAL_FILE" --config "$settings" \
    --scorer-url "$SCORER_URL" --samples "${SAMPLES:-4}" --out "$evaluations/$2" "${@:3}" \
    ${overrides[@]:+--set "${overrides[@]}"}
}
evaluate "$start" before
evaluate "$checkpoint" "$(basename "$checkpoint")" --against "$evaluations/before"
