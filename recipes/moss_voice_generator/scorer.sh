# Sourced by the launcher and by evaluate.sh: the scorers of laion_moss in one server, and an end of all children with the
# script. python is the Python, EMOLIA_DIR the folder of references.
#   CLAP_DIR          CLAP, asked twice: for the row's emotion and for the sentence of quality
#   ECAPA_DIR         speaker encoder; empty: Resemblyzer, which needs no download
#   ASR ASR_DIR       recogniser (whisper_wer or parakeet_wer) and its model; empty: bundled tiny Whisper, for tests
#   SCORER_TIMEOUT_S  how long it may load (900)

source "$(dirname "${BASH_SOURCE[0]}")/../children.sh"

# The GPUs of the scorer, 2,3 or nothing for the CPU; files FILE.yaml and FILE.log. A third word is the FILE.yaml of
# another start: the scorers are those in it, if it is there. Sets SCORER_URL.
start_scorer() {
  local gpus=$1 file=$2 device=cuda
  [[ -n "$gpus" ]] || device=cpu
  mkdir -p "$(dirname "$file")"
  # JSON is YAML, and quotes whatever a path may hold.
  ASR=${ASR:-whisper_wer} ASR_DIR=${ASR_DIR:-} ECAPA_DIR=${ECAPA_DIR:-} DEVICE=$device EMOLIA_DIR=$EMOLIA_DIR \
    CLAP_DIR=$CLAP_DIR AS_IN=${3:-} "$python" - >"$file.yaml" <<'PYTHON'
import json
from os import environ
from pathlib import Path

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
if Path(environ["AS_IN"]).is_file():
    scorers = json.loads(Path(environ["AS_IN"]).read_text(encoding="utf-8"))["scorers"]
    for scorer in scorers:
        scorer["options"] |= device
print(json.dumps({"scorers": scorers, "server": {"port": 0}}, indent=1))
PYTHON
  CUDA_VISIBLE_DEVICES=$gpus "$python" -m verl_tts.commands score --config "$file.yaml" >"$file.log" 2>&1 &
  await_scorer $! "$file.log" "${SCORER_TIMEOUT_S:-900}"
}
