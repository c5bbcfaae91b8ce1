#!/usr/bin/env bash
# GRPO on MOSS-VoiceGenerator with LAION's parameters. Everything after the script's name is an override, e.g.
#   MVG_DIR=... CODEC_DIR=... EMOLIA_DIR=... CLAP_DIR=... DATA_DIR=... OUTPUT_DIR=runs/moss \
#     bash run_moss_grpo.sh actor_rollout_ref.actor.optim.lr=2e-5
# MVG_DIR, CODEC_DIR  the model and its codec, MOSS-Audio-Tokenizer
# EMOLIA_DIR          folder with one folder of recordings a speaker; DATA_DIR (outputs/moss/data) is what
#                     data_process/voice_acting_prompts.py has made with it
# LORA_INIT           PEFT adapter to go on from, with a new optimizer; empty: a new one
# RESUME_STEP         go on from that step of OUTPUT_DIR; empty: from its newest whole checkpoint
# TRAIN_GPUS ROLLOUT_GPUS SCORER_GPUS   1 6 1; ROLLOUT_GPUS=0: rollouts on the GPUs that train
# COMMAND=doctor looks at all of it and trains nothing, COMMAND=screen lets the starting policy speak and be scored.
# Without SCORER_URL a scorer is started on the last SCORER_GPUS GPUs (0: on the CPU) and ended with the run. CLAP_DIR and
# its other variables: recipes/moss_voice_generator/scorer.sh
set -euo pipefail

name=$(basename "$0")
for variable in MVG_DIR CODEC_DIR EMOLIA_DIR; do
  [[ -n "${!variable:-}" ]] || { echo "$name: set $variable" >&2; exit 2; }
done
[[ -n "${CLAP_DIR:-}${SCORER_URL:-}" ]] || { echo "$name: set CLAP_DIR, or SCORER_URL to a scorer that is there" >&2; exit 2; }
train=${TRAIN_GPUS:-1} rollout=${ROLLOUT_GPUS:-6} scorers=${SCORER_GPUS:-1}
sync=${SYNC_EVERY:-5}
for count in "$train" "$rollout" "$scorers" "$sync"; do
  [[ "$count" =~ ^(0|[1-9][0-9]{0,4})$ ]] || { echo "$name: TRAIN_GPUS, ROLLOUT_GPUS, SCORER_GPUS and SYNC_EVERY are numbers, not $count" >&2; exit 2; }
done
((train)) || { echo "$name: TRAIN_GPUS=$train has to be 1 or more" >&2; exit 2; }
((sync)) || { echo "$name: SYNC_EVERY=$sync has to be 1 or more" >&2; exit 2; }
python=${PYTHON_BIN:-python3}
"$python" -c "import verl_tts, hydra" 2>/dev/null || { echo "$name: no verl_tts in $python: set PYTHON_BIN" >&2; exit 2; }
case "${COMMAND:-train}" in
  train) program=(verl_tts.main_omni) ;;
  doctor | screen) program=(verl_tts.commands "$COMMAND") ;;
  *) echo "$name: COMMAND=$COMMAND has to be train, doctor or screen" >&2; exit 2 ;;
esac
output=${OUTPUT_DIR:-outputs/moss_grpo} data=${DATA_DIR:-outputs/moss/data}

source "$(dirname "${BASH_SOURCE[0]}")/../../../recipes/moss_voice_generator/scorer.sh"

if [[ -z "${SCORER_URL:-}" ]]; then
  last=$((train + rollout + scorers - 1))
  if [[ " $* " == *" --dry-run "* ]]; then
    SCORER_URL=http://127.0.0.1:18080/score # nobody asks it
  else
    start_scorer "$( ((scorers == 0)) || seq -s, $((train + rollout)) "$last")" "$output.scorer"
  fi
fi
# The GPUs that the run may take, so that it does not take the scorer's.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((train + rollout - 1)))}

# A value as the grammar of overrides reads it, whatever it holds; null stays null.
quoted() { if [[ "$1" == null ]]; then echo null; else echo "'${1//\'/\\\'}'"; fi; }

resume=(trainer.resume_mode="${RESUME_MODE:-auto}")
[[ -z "${RESUME_STEP:-}" ]] ||
  resume=(trainer.resume_mode=resume_path trainer.resume_from_path="$(quoted "$output/checkpoints/global_step_$RESUME_STEP")")
correction=null
((sync == 1)) || correction=token # the clips of a step may be of an older policy

attend "$python" -m "${program[@]}" \
  actor_rollout_ref.model.path="$(quoted "$MVG_DIR")" \
  tts.codec_path="$(quoted "$CODEC_DIR")" \
  tts.reference_dir="$(quoted "$EMOLIA_DIR")" \
  tts.references="$(quoted "${REFERENCES:-$data/references.json}")" \
  data.train_files="$(quoted "${TRAIN_FILE:-$data/train.parquet}")" \
  data.val_files="$(quoted "${VAL_FILE:-$data/validation.parquet}")" \
  tts.reward.scorer_url="$(quoted "$SCORER_URL")" \
  tts.output_dir="$(quoted "$output")" \
  data.seed="${SEED:-42}" \
  data.train_batch_size=8 \
  data.max_prompt_length=1024 \
  data.max_response_length=600 \
  actor_rollout_ref.model.lora_rank=8 \
  actor_rollout_ref.model.lora_alpha=16 \
  actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj] \
  actor_rollout_ref.model.lora_adapter_path="$(quoted "${LORA_INIT:-null}")" \
  actor_rollout_ref.actor.policy_loss.loss_mode=gpg \
  actor_rollout_ref.actor.use_kl_loss=false \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  actor_rollout_ref.actor.optim.lr=5.0e-5 \
  actor_rollout_ref.actor.optim.lr_scheduler_type=constant \
  actor_rollout_ref.actor.optim.lr_warmup_steps=0 \
  tts.channel_reduction=weighted \
  tts.channel_weights="'1,32'" \
  actor_rollout_ref.rollout.n=4 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.top_p=0.8 \
  actor_rollout_ref.rollout.top_k=50 \
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
  actor_rollout_ref.rollout.val_kwargs.top_p=0.8 \
  actor_rollout_ref.rollout.val_kwargs.top_k=50 \
  tts.reward.preset=laion_moss \
  tts.sync_every="$sync" \
  algorithm.rollout_correction.rollout_is="$correction" \
  trainer.experiment_name=moss_voice_generator_laion \
  trainer.n_gpus_per_node="$train" \
  tts.engine.rollout_gpus="$rollout" \
  trainer.total_training_steps="${TOTAL_TRAINING_STEPS:-1600}" \
  trainer.test_freq="${TEST_FREQ:-50}" \
  trainer.save_freq="${SAVE_FREQ:-200}" \
  trainer.max_actor_ckpt_to_keep=8 \
  "${resume[@]}" \
  "$@"
