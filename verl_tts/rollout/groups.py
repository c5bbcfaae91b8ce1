"""From scored groups to the batch that verl trains on.

A group is whole or it is not trained: GRPO compares siblings, and verl's own sync trainer would train on what is
left of a group and pad the batch with synthetic rows.

Shapes: ``T`` sampled token, ``Q`` codebook, ``H`` hidden.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_tts.errors import GateError, RolloutError
from verl_tts.rewards.client import request_metrics
from verl_tts.rewards.compose import VIOLATION
from verl_tts.rewards.manager import mean_parts
from verl_tts.rollout.agent_loop import AgentLoopManager, Group, Sample, Split


@dataclass(frozen=True)
class GroupRule:
    """What becomes of a training step whose rollouts did not all succeed."""

    on_failure: str  # "stop" or "drop"
    min_groups: float  # share of the submitted groups that has to be left
    divisor: Callable[[], int]  # the number of groups has to divide by it: world size and mini-batches

    def apply(self, groups: Sequence[Group]) -> list[Group]:
        """The groups to train on, in order. Raises where the rule says stop."""
        failed = [group for group in groups if group.failure is not None]
        if not failed:
            return list(groups)
        first = failed[0].failure
        assert first is not None
        if self.on_failure == "stop":
            raise RolloutError(
                f"{len(failed)} of {len(groups)} groups have a failed rollout, the first of prompt "
                f"{failed[0].row.id}: {first}; tts.failed_group=drop trains on the others"
            ) from first
        whole = [group for group in groups if group.failure is None]
        whole = whole[: len(whole) - len(whole) % self.divisor()]
        if not whole or len(whole) / len(groups) < self.min_groups:
            raise GateError(
                f"{len(whole)} of {len(groups)} groups are left after dropping those with a failed rollout, and "
                f"tts.min_groups={self.min_groups:g} wants more; the first failure: {first}"
            ) from first
        return whole


class GroupBuffer:
    """Stands where verl has its replay buffer: ``sample`` hands over a batch once it is complete.

    Only whole groups enter the transfer queue, in one write, ordered by prompt and sample, so that a step does
    not depend on the order of arrival.
    """

    agent_loop: AgentLoopManager  # set once the agent loop exists

    def __init__(self, rule: GroupRule) -> None:
        self.rule = rule
        self._validated: list[Sample] = []  # of the validation under way
        self.texts: dict[str, str] = {}
        """Metrics of the last training batch that are no numbers: verl's aggregation drops them."""

    def sample(self, global_steps: int, partition_id: Split, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Waits for the submitted groups; returns verl's batch (a ``KVBatchMeta``) and metrics."""
        groups = self.agent_loop.collect(partition_id)
        _clear_announcements(partition_id)
        assert len(groups) == batch_size, f"{len(groups)} groups were submitted, {batch_size} are asked for"
        if partition_id == "train":
            whole = self.rule.apply(groups)
            self.agent_loop.rewards.end_step(sample.score for group in whole for sample in group.samples)
        else:
            whole = _all_or_raise(groups)
            self._validated += [sample for group in whole for sample in group.samples]
        keys, fields, tags = [], [], []
        for position, group in enumerate(whole):
            for k, sample in enumerate(group.samples):
                # verl reads keys as uid_session_index; its GRPO groups rows by uid.
                uid = f"{partition_id}-{global_steps}-{position}"
                keys.append(f"{uid}_{k}_0")
                fields.append(to_fields(sample, uid))
                tags.append(to_tags(sample, global_steps))
        batch = tq.kv_batch_put(
            keys=keys, partition_id=partition_id, fields=list_of_dict_to_tensordict(fields), tags=tags
        )
        metrics = describe(groups, whole)
        if partition_id == "train":
            metrics |= staleness(whole, global_steps)
            self.texts = {name: value for name, value in metrics.items() if isinstance(value, str)}
        return batch, metrics

    def take_validated(self) -> list[Sample]:
        """What the last validation sampled; verl hands on its means alone."""
        samples, self._validated = self._validated, []
        return samples


def _clear_announcements(partition_id: str) -> None:
    """verl's validation writes a key per prompt, for a buffer that polls; nothing reads them here."""
    keys = [key for key, tag in (tq.kv_list(partition_id) or {}).get(partition_id, {}).items() if tag.get("is_prompt")]
    if keys:
        tq.kv_clear(keys=keys, partition_id=partition_id)


def _all_or_raise(groups: list[Group]) -> list[Group]:
    for group in groups:
        if group.failure is not None:
            raise RolloutError(f"validation: the rollout of prompt {group.row.id} failed: {group.failure}")
    return groups


def to_fields(sample: Sample, uid: str) -> dict[str, Any]:
    """One row of the transfer queue: verl's columns, and ours that the actor's replay needs (types.py has them)."""
    rollout, given = sample.rollout, sample.given
    responses_T = torch.tensor(rollout.tokens_T)
    prompts = torch.tensor(list(given.text_ids), dtype=torch.int64)
    mask_T = torch.tensor(rollout.is_action_T).long()
    rm_scores_T = torch.zeros(len(responses_T), dtype=torch.float32)
    rm_scores_T[-1] = sample.score.total
    input_ids = torch.cat([prompts, responses_T])
    return {
        "prompts": prompts,
        "responses": responses_T,
        "response_mask": mask_T,
        "loss_mask": mask_T,
        "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids)),
        "rollout_log_probs": torch.tensor(rollout.logprobs_T),
        "rm_scores": rm_scores_T,
        **{name: torch.tensor(column) for name, column in {**rollout.columns(), **given.columns()}.items()},
        "uid": uid,
        "num_turns": 2,
        "data_source": sample.row.data_source,
        "reward_model": {"style": "rule", "ground_truth": sample.row.ground_truth},
        # A clip that a guard turned down has no value for the scorer's parts, and verl averages what is here.
        "extra_fields": {
            "reward_extra_info": {name: part for name, part in sample.score.parts.items() if not math.isnan(part)}
        },
    }


def to_tags(sample: Sample, global_steps: int) -> dict[str, Any]:
    prompt, response = len(sample.given.text_ids), len(sample.rollout.tokens_T)
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": global_steps,
        "min_global_steps": sample.weights_step,
        "max_global_steps": sample.weights_step,
    }


def describe(submitted: Sequence[Group], whole: Sequence[Group]) -> dict[str, Any]:
    """What a step's rollouts and rewards were like, under ``rollout/`` and ``reward/``."""
    samples = [sample for group in whole for sample in group.samples]
    frames = np.array([len(sample.rollout.codes_FQ) for sample in samples])
    scores = np.array([sample.score.total for sample in samples])
    ended = np.array([sample.rollout.stop_reason == "eos" for sample in samples])
    flat = [np.ptp([sample.score.total for sample in group.samples]) == 0 for group in whole if len(group.samples) > 1]
    metrics: dict[str, Any] = {
        "rollout/rows_real": len(samples),
        "rollout/groups_dropped": len(submitted) - len(whole),
        "rollout/frames/mean": frames.mean(),
        "rollout/frames/max": frames.max(),
        "rollout/audio_s": sum(sample.waveform.seconds for sample in samples),
        "rollout/eos_rate": ended.mean(),
        "reward/mean": scores.mean(),
        "reward/std": scores.std(),
    }
    if flat:
        metrics["reward/flat_group_rate"] = np.mean(flat)
    metrics["reward/violation_rate"] = np.mean([VIOLATION in sample.score.notes for sample in samples])
    metrics |= {f"reward/parts/{name}": value for name, value in mean_parts(sample.score for sample in samples).items()}
    return metrics | {f"reward/scorer/{name}": value for name, value in served(samples).items()}


def staleness(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Updates between the policy that sampled and the one that is trained in ``step``: 0 after each sync."""
    steps = [sample.weights_step for group in groups for sample in group.samples if sample.weights_step is not None]
    return {"rollout/staleness": float(step - 1 - min(steps))} if steps else {}


def served(samples: Iterable[Sample]) -> dict[str, float | str]:
    """How the scorer served them: latencies, retries, waiting, and who was slowest."""
    return request_metrics((sample.row.id, sample.score) for sample in samples)
