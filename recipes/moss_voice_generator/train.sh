#!/usr/bin/env bash
# The run, on what prepare.sh has left in WORK. Everything after the script's name is an override.
#   bash recipes/moss_voice_generator/train.sh
#   TRAIN_GPUS=1 ROLLOUT_GPUS=2 SCORER_GPUS=1 bash recipes/moss_voice_generator/train.sh
#   PHASE=v7 bash recipes/moss_voice_generator/train.sh      500 steps from v1's adapter, LORA_INIT (WORK/v1)
#   SCORER_URL=http://HOST:PORT/score bash recipes/moss_voice_generator/train.sh tts.output_dir=runs/moss
# PHASE is v1 (500 steps, the weights of v1), v7, or empty: the launcher's own 1600 steps with the weights of v7.
# The variables of run_moss_grpo.sh win over what is in WORK.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=${WORK:-outputs/moss}
source "$root/recipes/run.sh"
export PYTHON_BIN=${PYTHON_BIN:-python3}
export MVG_DIR=${MVG_DIR:-$work/model} CODEC_DIR=${CODEC_DIR:-$work/codec} CLAP_DIR=${CLAP_DIR:-$work/clap}
export EMOLIA_DIR=${EMOLIA_DIR:-$work/emolia} DATA_DIR=${DATA_DIR:-$work/data}
if [[ -z "${ASR_DIR:-}" && -d "$work/asr" ]]; then export ASR_DIR=$work/asr; fi
if [[ -z "${ECAPA_DIR:-}" && -d "$work/ecapa" ]]; then export ECAPA_DIR=$work/ecapa; fi

phase=()
case "${PHASE:-}" in
  v1) export TOTAL_TRAINING_STEPS=${TOTAL_TRAINING_STEPS:-500} SAVE_FREQ=${SAVE_FREQ:-100}
    phase=(tts.reward.compose.weight_set=v1) ;;
  v7) export TOTAL_TRAINING_STEPS=${TOTAL_TRAINING_STEPS:-500} SAVE_FREQ=${SAVE_FREQ:-100} LORA_INIT=${LORA_INIT:-$work/v1}
    phase=(tts.reward.compose.weight_set=v7) ;;
  "") ;;
  *) echo "train.sh: PHASE=$PHASE has to be v1, v7 or empty" >&2; exit 2 ;;
esac

for place in "$MVG_DIR" "$CODEC_DIR" "$EMOLIA_DIR" \
  "${TRAIN_FILE:-$DATA_DIR/train.parquet}" "${VAL_FILE:-$DATA_DIR/validation.parquet}"; do
  require "$place" "prepare.sh makes it, in WORK=$work"
done
[[ "${REFERENCES:-}" == null ]] || require "${REFERENCES:-$DATA_DIR/references.json}" "prepare.sh makes it, in WORK=$work"
[[ -n "${SCORER_URL:-}" ]] || require "$CLAP_DIR" "prepare.sh makes it, in WORK=$work; or set SCORER_URL"
[[ -z "${LORA_INIT:-}" ]] || require "$LORA_INIT" "verl-tts export CHECKPOINT_OF_V1 $LORA_INIT --adapter makes it"

exec bash "$root/examples/grpo_trainer/moss/run_moss_grpo.sh" ${phase[@]:+"${phase[@]}"} "$@"
