# Sourced by the launcher and by evaluate.sh: the scorers of laion_moss in one server, and an end of all children with the
# script. python is the Python, EMOLIA_DIR the folder of references.
#   CLAP_DIR          CLAP, asked twice: for the row's emotion and for the sentence of quality
#   ECAPA_DIR         speaker encoder; empty: Resemblyzer, which needs no download
#   ASR ASR_DIR       recogniser (whisper_wer or parakeet_wer) and its model; empty: bundled tiny Whisper, for tests
#   SCORER_TIMEOUT_S  how long it may load (900)

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
healthy() { "$python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' "$1/healthz" 2>/dev/null; }

start_scorer() { # the GPUs of the scorer, 2,3 or nothing for the CPU; files FILE.yaml and FILE.log; sets SCORER_URL
  local gpus=$1 file=$2 device=cuda address="" scorer
  [[ -n "$gpus" ]] || device=cpu
  mkdir -p "$(dirname "$file")"
  # JSON is YAML, and quotes whatever a path may hold.
  ASR=${ASR:-whisper_wer} ASR_DIR=${ASR_DIR:-} ECAPA_DIR=${ECAPA_DIR:-} DEVICE=$device EMOLIA_DIR=$EMOLIA_DIR \
    CLAP_DIR=$CLAP_DIR "$python" - >"$file.yaml" <<'PYTHON'
import json
from os import environ

device, clap = {"device": environ["DEVICE"]}, {"model": environ["CLAP_DIR"]}
asr = {"model": environ["ASR_DIR"]} if environ["ASR_DIR"] else {}
ecapa = {"backend": "ecapa", "model": environ["ECAPA_DIR"]} if environ["ECAPA_DIR"] else {}
emotion = {"template": "a voice full of {emotion}"}
quality = {"text": "High Quality Recording, fluid pleasant performance"}
scorers = [
    {"scorer": environ["ASR"], "options": device | asr},
    {"scorer": "speaker_similarity", "options": device | ecapa | {"references": environ["EMOLIA_DIR"]}},
    {"scorer": "clap", "name": "clap_emotion", "options": device | clap | emotion},
    {"scorer": "clap", "name": "clap_quality", "options": device | clap | quality},
]
print(json.dumps({"scorers": scorers, "server": {"port": 0}}, indent=1))
PYTHON
  CUDA_VISIBLE_DEVICES=$gpus "$python" -m verl_tts.commands score --config "$file.yaml" >"$file.log" 2>&1 &
  scorer=$!
  children+=("$scorer")
  local until=$((SECONDS + ${SCORER_TIMEOUT_S:-900}))
  until [[ -n "$address" ]] && healthy "$address"; do
    kill -0 "$scorer" 2>/dev/null || fail "the scorer ended: $(tail -n 1 "$file.log")"
    ((SECONDS < until)) || fail "the scorer did not answer in ${SCORER_TIMEOUT_S:-900} s, see $file.log"
    sleep 0.5
    address=$(sed -n 's/.* listening on \(http[^ ]*\).*/\1/p' "$file.log" | head -n 1) # the port is a free one
  done
  echo "scorer on $address, log $file.log"
  export SCORER_URL=$address/score
}

# Runs a command as a child, so that a signal to the script reaches it; its exit code is the command's.
attend() {
  "$@" &
  children+=($!)
  wait $!
}
