#!/usr/bin/env bash
# All that train.sh needs, into WORK (outputs/hindi): models, merge, speaker, prompts. What is there already is left alone.
#   REF_AUDIO=reference.wav bash recipes/hindi_sft_lora/prepare.sh
# REF_AUDIO   a recording of the voice: one second and more, 16 kHz and up; yours to use
# READY_MADE  1: download the published merge instead of merging
# SHARDS      folder with parquet shards of IndicVoices-R Hindi, instead of the hub
# PINS        hindi, or a file with other pins for other weights; see verl_tts/config/hindi_pins.json
set -euo pipefail

[[ -n "${REF_AUDIO:-}" ]] || { echo "prepare.sh: set REF_AUDIO to a recording of the voice" >&2; exit 2; }
[[ -f "$REF_AUDIO" ]] || { echo "prepare.sh: REF_AUDIO=$REF_AUDIO is no file" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON_BIN:-python3}
work=${WORK:-outputs/hindi}

download() { # repository, revision, folder; goes on where it was cut off
  "$python" "$root/recipes/download.py" "$@"
}
verl_tts() { "$python" -m verl_tts.commands "$@"; }

download Qwen/Qwen3-TTS-12Hz-0.6B-Base 5d83992436eae1d760afd27aff78a71d676296fc "$work/base"
download openai/whisper-large-v3-turbo 41f01f3fe87f28c78e2fbf8b568835947dd65ed9 "$work/whisper"
if [[ "${READY_MADE:-0}" == 1 ]]; then
  download littleFishhhh/Qwen3-TTS-12Hz-0.6B-Hindi-SFT-Merged e9fe1bdcd485fc4ff4121e7ba8e2385dbb857355 "$work/model"
elif [[ ! -e "$work/model" ]]; then
  download akashicmarga/qwen3-tts-hindi-lora a8718cac15b5a40bd4926b47d0854162ff32010a "$work/adapter"
  verl_tts merge-lora --base "$work/base" --adapter "$work/adapter/adapters.safetensors" --expect "${PINS:-hindi}" \
    --out "$work/model"
fi

[[ -e "$work/speaker.json" ]] || verl_tts speaker --model "$work/base" --audio "$REF_AUDIO" --out "$work/speaker.json"
[[ -e "$work/data" ]] ||
  "$python" "$root/data_process/indicvoices_hindi.py" --out "$work/data" ${SHARDS:+--shards "$SHARDS"} "$@"
verl_tts check-data "$work/data/train.parquet" "$work/data/validation.parquet" \
  --speakers "$work/speaker.json" --model "$work/model"
