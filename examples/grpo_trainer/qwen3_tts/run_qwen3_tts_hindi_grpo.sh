#!/usr/bin/env bash
# GRPO on Qwen3-TTS 0.6B with the Hindi SFT LoRA merged: the published recipe, see recipes/hindi_sft_lora/README.md.
# Takes the variables of run_qwen3_tts_grpo.sh and changes what differs; everything after the script's name is an override.
set -euo pipefail

export OUTPUT_DIR=${OUTPUT_DIR:-outputs/qwen3_tts_hindi_grpo}
export TOTAL_TRAINING_STEPS=${TOTAL_TRAINING_STEPS:-400}
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen3_tts_grpo.sh" \
  data.train_max_samples=863 \
  data.max_prompt_length=256 \
  data.max_response_length=240 \
  actor_rollout_ref.model.enable_gradient_checkpointing=false \
  actor_rollout_ref.model.lora_rank=8 \
  actor_rollout_ref.model.lora_alpha=16 \
  actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj] \
  actor_rollout_ref.actor.optim.lr=5.0e-6 \
  actor_rollout_ref.actor.optim.weight_decay=0.01 \
  actor_rollout_ref.actor.kl_loss_coef=0.08 \
  actor_rollout_ref.actor.kl_loss_type=k3 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.rollout.n=4 \
  actor_rollout_ref.rollout.temperature=0.9 \
  actor_rollout_ref.rollout.top_p=0.95 \
  actor_rollout_ref.rollout.top_k=50 \
  actor_rollout_ref.rollout.val_kwargs.temperature=0.9 \
  actor_rollout_ref.rollout.val_kwargs.top_p=0.95 \
  actor_rollout_ref.rollout.val_kwargs.top_k=50 \
  tts.reward.preset=cer_published \
  trainer.experiment_name=qwen3_tts_0_6b_hindi_sft_lora_grpo \
  trainer.max_actor_ckpt_to_keep=21 \
  "$@"
