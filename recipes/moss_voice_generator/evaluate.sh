#!/usr/bin/env bash
# Before and after: the model that the run began with and a checkpoint of it, on the validation prompts, by one scorer.
#   bash recipes/moss_voice_generator/evaluate.sh                               the newest checkpoint of OUTPUT_DIR
#   SAMPLES=8 bash recipes/moss_voice_generator/evaluate.sh runs/moss/checkpoints/global_step_200
# What follows the checkpoint is an override. The settings are those of the run, whatever its phase, and so are the
# scorers, where the run has started them itself; SCORER_URL otherwise as for train.sh. Cut off, it goes on where it was.
# EVALUATIONS is where both are kept (WORK/evaluations), SAMPLES how many clips a row (4); SCORER_GPU is the scorer's (1),
# empty: the CPU. VAL_FILE names other prompts than those that the run was validated with.
# A run that went on from an adapter (LORA_INIT) began with the two merged: EVALUATIONS/start.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=${WORK:-outputs/moss} python=${PYTHON_BIN:-python3}
export PYTHON_BIN=$python OUTPUT_DIR=${OUTPUT_DIR:-outputs/moss_grpo}
export CLAP_DIR=${CLAP_DIR:-$work/clap} EMOLIA_DIR=${EMOLIA_DIR:-$work/emolia}
# As train.sh does it, for a run that has left no list of its scorers.
if [[ -z "${ASR_DIR:-}" && -d "$work/asr" ]]; then export ASR_DIR=$work/asr; fi
if [[ -z "${ECAPA_DIR:-}" && -d "$work/ecapa" ]]; then export ECAPA_DIR=$work/ecapa; fi
source "$root/recipes/moss_voice_generator/scorer.sh"
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
start=${of_run[0]} adapter=${of_run[1]:-}
[[ -n "${SCORER_URL:-}" ]] ||
  start_scorer "${SCORER_GPU-1}" "$evaluations/scorer" "$(dirname "$(dirname "$checkpoint")").scorer.yaml"
if [[ -n "$adapter" ]]; then
  start=$evaluations/start
  [[ -d "$start" ]] ||
    attend "$python" -m verl_tts.commands merge-lora --base "${of_run[0]}" --adapter "$adapter" --out "$start"
fi
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}

evaluate() { # policy, name, further words
  attend "$python" -m verl_tts.commands evaluate "$1" --data "$prompts" --config "$settings" \
    --scorer-url "$SCORER_URL" --samples "${SAMPLES:-4}" --out "$evaluations/$2" "${@:3}" \
    ${overrides[@]:+--set "${overrides[@]}"}
}
evaluate "$start" before
evaluate "$checkpoint" "$(basename "$checkpoint")" --against "$evaluations/before"
