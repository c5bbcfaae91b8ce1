# Sourced by train.sh and evaluate.sh: a Whisper scorer beside the work, and an end of all children with the script.
#   SCORER_GPU        its GPU: the one after those of the work; cpu: none
#   SCORER_MODEL      what `verl-tts score --scorer whisper_cer --model` reads (WORK/whisper)
#   SCORER_TIMEOUT_S  how long it may load (600)

python=$PYTHON_BIN
source "$(dirname "${BASH_SOURCE[0]}")/../children.sh"

start_scorer() { # number of GPUs of the work; sets SCORER_URL
  local gpu=${SCORER_GPU:-$1} device=cuda log=$work/scorer.log
  if [[ "$gpu" == cpu ]]; then device=cpu gpu=""; fi
  mkdir -p "$work"
  CUDA_VISIBLE_DEVICES=$gpu "$python" -m verl_tts.commands score --scorer whisper_cer \
    --model "${SCORER_MODEL:-$work/whisper}" --language hi --device "$device" --port 0 >"$log" 2>&1 &
  await_scorer $! "$log" "${SCORER_TIMEOUT_S:-600}"
}

# The GPUs that the work may take, so that it does not take the scorer's.
keep_gpus() { export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $(($1 - 1)))}; }
