# Sourced by train.sh and evaluate.sh: a Whisper scorer beside the work, and an end of all children with the script.
#   SCORER_GPU        its GPU: the one after those of the work; cpu: none
#   SCORER_MODEL      what `verl-tts score --scorer whisper_cer --model` reads (WORK/whisper)
#   SCORER_TIMEOUT_S  how long it may load (600)

children=()
stop() {
  ((${#children[@]})) || return 0
  kill "${children[@]}" 2>/dev/null || true
  wait "${children[@]}" || true
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() { echo "$(basename "$0"): $*" >&2; exit 3; }
healthy() { "$PYTHON_BIN" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' "$1/healthz" 2>/dev/null; }

start_scorer() { # number of GPUs of the work; sets SCORER_URL
  local gpu=${SCORER_GPU:-$1} device=cuda log=$work/scorer.log address="" scorer
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

# The GPUs that the work may take, so that it does not take the scorer's.
keep_gpus() { export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $(($1 - 1)))}; }

# Runs a command as a child, so that a signal to the script reaches it; its exit code is the command's.
attend() {
  "$@" &
  children+=($!)
  wait $!
}
