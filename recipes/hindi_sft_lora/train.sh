#!/usr/bin/env bash
# The run, on what prepare.sh has left in WORK. Everything after the script's name is an override.
#   bash recipes/hindi_sft_lora/train.sh
#   SCORER_URL=http://HOST:PORT/score bash recipes/hindi_sft_lora/train.sh tts.output_dir=runs/hindi
# Without SCORER_URL a Whisper scorer is started on SCORER_GPU (the one after the NUM_GPUS of the run; cpu: on none) and
# ended with the run. SCORER_MODEL and SCORER_TIMEOUT_S are its model and the time that it has to load it.
# MODEL_PATH, TRAIN_FILE and the other variables of run_qwen3_tts_grpo.sh win over what is in WORK.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=${WORK:-outputs/hindi}
export PYTHON_BIN=${PYTHON_BIN:-python3} NUM_GPUS=${NUM_GPUS:-2}
export MODEL_PATH=${MODEL_PATH:-$work/model} SPK_EMBED_PATH=${SPK_EMBED_PATH:-$work/speaker.json}
export TRAIN_FILE=${TRAIN_FILE:-$work/data/train.parquet} VAL_FILE=${VAL_FILE:-$work/data/validation.parquet}

children=()
stop() {
  ((${#children[@]})) || return 0
  kill "${children[@]}" 2>/dev/null || true
  wait "${children[@]}" || true
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() { echo "train.sh: $*" >&2; exit 3; }
healthy() { "$PYTHON_BIN" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' "$1/healthz" 2>/dev/null; }

start_scorer() {
  local gpu=${SCORER_GPU:-$NUM_GPUS} device=cuda log=$work/scorer.log address="" scorer
  if [[ "$gpu" == cpu ]]; then device=cpu gpu=""; fi
  mkdir -p "$work"
  CUDA_VISIBLE_DEVICES=$gpu "$PYTHON_BIN" -m verl_tts.commands score --scorer whisper_cer \
    --model "${SCORER_MODEL:-$work/whisper}" --language hi --device "$device" --port 0 >"$log" 2>&1 &
  scorer=$!
  children+=("$scorer")
  local until=$((SECONDS + ${SCORER_TIMEOUT_S:-600}))
  until [[ -n "$address" ]] && healthy "$address"; do
    kill -0 "$scorer" 2>/dev/null || fail "the scorer ended: $(tail -n 1 "$log")"
    ((SECONDS < until)) || fail "the scorer did not answer in ${SCORER_TIMEOUT_S:-600} s, see $log"
    sleep 0.5
    address=$(sed -n 's/.* listening on \(http[^ ]*\).*/\1/p' "$log" | head -n 1) # the port is a free one
  done
  echo "scorer whisper_cer on $address, log $log"
  export SCORER_URL=$address/score
}

[[ -n "${SCORER_URL:-}" ]] || start_scorer
# The GPUs that the run may take, so that it does not take the scorer's.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((NUM_GPUS - 1)))}
bash "$root/examples/grpo_trainer/qwen3_tts/run_qwen3_tts_hindi_grpo.sh" "$@" &
children+=($!)
wait $!
