"""The processes of a run: the driver, Ray, and the actor that holds the trainer.

driver (this process; imports neither torch nor verl)
+-- Ray
    +-- TaskRunner        trainer, agent loop, reward client
    +-- actor workers     one a GPU: actor and reference, sender of weights
    +-- rollout servers   one a replica; each has the engine's two stages as children
    +-- transfer queue, balancer
"""

import asyncio
import math
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_tts import stacks
from verl_tts.checkpoints.manifest import REWARD_RULE, TRAINED, read_manifest, world_size_of
from verl_tts.config.compose import environment_with, trained_rule, tts_config
from verl_tts.config.reward import reward_rule
from verl_tts.config.validate import external_modules
from verl_tts.errors import CheckpointError, ConfigError, DataError, ProcessDied, Stalled
from verl_tts.heartbeat import Heartbeat
from verl_tts.report.console import Line, Say, output_to
from verl_tts.report.run_dir import Attempt, RunDir
from verl_tts.rewards.manager import RewardManager
from verl_tts.rewards.protocol import ScorerInfo
from verl_tts.types import PromptRow

SHUTDOWN_LIMIT_S = 30.0
RAY_ADDRESS_LIMIT_S = 5.0
LOOPBACK = "127.0.0.1"
# Read by Ray 2.60 when it is imported: the node's address is then the loopback's, and whoever asks Ray for it, as the
# transfer queue does, which unpickles what it is sent, listens there (docs/security.md). ray.init() itself replaces
# 127.0.0.1 by an address that others can reach.
KEPT_AT_HOME = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
STACKS = "stacks.txt"  # in the run directory: where each process was when the run hung
STACKS_DIR = ".stacks"  # beside it, while the run lasts: what it is made of, see verl_tts/stacks.py
STACKS_LIMIT_S = 30.0  # that another node may take to answer where its processes are
POLL_S = 1.0  # how often the driver asks the trainer for lines to show
SETTINGS_SHOWN = 3  # settings in a message
CALLS_AT_ONCE = 3  # TaskRunner's: the run, and beside it the question how it goes and the order to end
WORKER_ENVIRONMENT = {
    "TRANSFER_QUEUE_ENABLE": "1",  # verl's worker methods read their batch from the queue
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# Ray starts an idle Python process for each CPU that it is told of, and a run says more than there are.
RAY_ENVIRONMENT = {"RAY_prestart_worker_first_driver": "0", "RAY_DEDUP_LOGS": "0"}


def run(config: DictConfig) -> None:
    """Trains until ``trainer.total_training_steps``; raises a ``TTSError`` where the run was refused or stopped."""
    # Before anything is started or written. The agent loop asks the scorer again, with its own connections.
    check_ray_address(os.environ.get("RAY_ADDRESS", ""))
    scorer = asyncio.run(_probe(config))
    run_dir = RunDir(config.tts.output_dir)
    claimed = run_dir.claim(resume_target(config))
    with closing(run_dir), output_to(run_dir.train_log, config.tts.console) as say:
        say(Line(f"run directory {run_dir.path}, log {run_dir.train_log.name}", "result"))
        last_step = config.trainer.total_training_steps
        is_done = last_step is not None and claimed.step >= last_step
        done = f"trainer.total_training_steps={last_step}, and step {claimed.step} is done"
        if is_done and not run_dir.owes_validation(claimed.step, config.trainer.test_freq, last_step):
            say(Line(f"nothing to do: {done}", "result"))
            return
        if claimed.checkpoint is not None:
            check_world_size(claimed.checkpoint, config)
            check_scorer(claimed.checkpoint, scorer, config)
            check_reward(claimed.checkpoint, config)
            check_trained(claimed.checkpoint, config)
        attempt = run_dir.begin(claimed, config)
        for note in attempt.notes:
            say(Line(note, "warning"))
        if is_done:
            say(Line(f"{done}, but was not validated: that is made up for", "result"))
        if attempt.checkpoint is not None:
            say(Line(f"going on from {attempt.checkpoint}", "result"))
        with ray_cluster(config) as stacks_dir:
            _drive(config, attempt, say, run_dir.path / STACKS, stacks_dir)
        say(Line(f"done: {run_dir.metrics}, {run_dir.samples}, {run_dir.checkpoints}", "result"))


def check_ray_address(address: str) -> None:
    """Somebody listens at HOST:PORT. Ray asks a dead address for a minute and a half, deaf to signals."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # auto, local, or unset
    try:
        socket.create_connection((host.strip("[]"), int(port)), RAY_ADDRESS_LIMIT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"RAY_ADDRESS={address} cannot be joined: {error}; unset it to start a cluster") from error


def check_world_size(checkpoint: Path, config: DictConfig) -> None:
    """verl's shards of a checkpoint fit the number of actor workers that wrote them, and no other."""
    written, now = world_size_of(checkpoint), config.trainer.nnodes * config.trainer.n_gpus_per_node
    if written != now:
        raise CheckpointError(
            f"{checkpoint} was written by {written} actor worker(s), this run has {now}: resume with as many, "
            "or export it and start from the exported model"
        )


def check_scorer(checkpoint: Path, scorer: ScorerInfo, config: DictConfig) -> None:
    """A run goes on with the scorer that it began with, unless a setting says otherwise."""
    before = read_manifest(checkpoint).scorer_fingerprint
    if before != scorer.fingerprint and not config.tts.reward.allow_other_scorer:
        raise CheckpointError(
            f"{checkpoint} was trained with the scorer {before or 'without a fingerprint'}, this one is "
            f"{scorer.fingerprint or 'without a fingerprint'} ({scorer.name or config.tts.reward.scorer_url}): start "
            "the one of before, or set tts.reward.allow_other_scorer=true"
        )


def check_reward(checkpoint: Path, config: DictConfig) -> None:
    """A run goes on with the reward that it began with: the same guards, components, weights and gate."""
    reward = tts_config(config).reward
    before = read_manifest(checkpoint).extra.get(REWARD_RULE)
    if before is None or reward.allow_other_reward:
        return
    if changed := _changed(before, reward_rule(reward)):
        raise CheckpointError(
            f"{checkpoint} was trained with another tts.reward: {changed}; set what was there before, or "
            "tts.reward.allow_other_reward=true"
        )


def check_trained(checkpoint: Path, config: DictConfig) -> None:
    """A run goes on with the parameters that it trains: of another rank they do not load, of another alpha they do."""
    before = read_manifest(checkpoint).extra.get(TRAINED)
    if before is not None and (changed := _changed(before, trained_rule(config))):
        raise CheckpointError(
            f"{checkpoint} trains other parameters: {changed}; set what was there before, or export it and start "
            "from the exported model"
        )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings that differ, to be read; empty where none does."""
    changed = [name for name in dict.fromkeys((*now, *before)) if before.get(name) != now.get(name)]
    shown = ", ".join(f"{name} was {before.get(name)}, is {now.get(name)}" for name in changed[:SETTINGS_SHOWN])
    return shown + (f", and {len(changed) - SETTINGS_SHOWN} more" if len(changed) > SETTINGS_SHOWN else "")


async def _probe(config: DictConfig) -> ScorerInfo:
    rewards = reward_manager(config)
    try:
        return await rewards.probe()
    finally:
        await rewards.aclose()


def reward_manager(config: DictConfig) -> RewardManager:
    """As ``tts.reward`` and verl's ``reward.custom_reward_function`` say."""
    nodes = (config.tts.reward, config.reward.custom_reward_function)
    return RewardManager.from_config(*(OmegaConf.to_container(node, resolve=True) for node in nodes))  # type: ignore[arg-type]


def _drive(config: DictConfig, attempt: Attempt, say: Say, stacks_file: Path, stacks_dir: Path) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 1, "max_concurrency": CALLS_AT_ONCE, "scheduling_strategy": here}
    runner = ray.remote(TaskRunner).options(**options).remote(config, attempt)
    with signals_noted() as signals:
        try:
            running = runner.run.remote()
            _watch(runner, running, signals, say, config.tts)
            ray.get(running)
        except ray.exceptions.RayError as error:
            raise root_cause(error) from error
        except Stalled as error:
            answers = stacks.collect(stacks_dir)
            stacks.write(answers, stacks_file)  # before Ray is asked, which may be what hangs
            answers |= stacks_elsewhere(stacks_dir)
            stacks.write(answers, stacks_file)
            raise Stalled(f"{error}; the stacks of {len(answers)} processes are in {stacks_file}") from error
        finally:
            ray.wait([runner.shutdown.remote()], timeout=SHUTDOWN_LIMIT_S)


def stacks_elsewhere(stacks_dir: Path) -> dict[str, str]:
    """``stacks.collect`` of the other nodes; one that does not answer in time, or cannot, is left out."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    collect = ray.remote(num_cpus=0, max_retries=0)(stacks.collect)
    on = (NodeAffinitySchedulingStrategy(node, soft=False) for node in others)
    asked = [collect.options(scheduling_strategy=strategy).remote(stacks_dir) for strategy in on]
    answers: dict[str, str] = {}
    for answer in ray.wait(asked, num_returns=len(asked), timeout=STACKS_LIMIT_S)[0] if asked else []:
        with suppress(ray.exceptions.RayError):
            answers |= ray.get(answer)
    return answers


def _watch(runner: Any, running: Any, signals: list[signal.Signals], say: Say, tts: DictConfig) -> None:
    """Until the run has ended: shows its lines, asks it to stop where a signal says so, and sees that it moves.

    The first signal lets the step in hand end, be saved and be the last one; a second one, or ``tts.grace_s``, does not
    wait for that. Raises ``Stalled``, and ``SystemExit`` with the exit code of the first signal.
    """
    import ray

    deadline = math.inf
    done = False
    while not done:
        done = bool(ray.wait([running], timeout=POLL_S)[0])
        pulse: Pulse = _answer(runner.pulse, signals, tts.stall_s)
        for line in pulse.lines:
            say(line)
        if pulse.stalled:
            raise Stalled(pulse.stalled)
        if not signals:
            continue
        if deadline == math.inf and not done and _answer(runner.stop_after_step, signals, tts.stall_s):
            deadline = time.monotonic() + tts.grace_s
            say(Line(f"signal {signals[0].name}: stopping after this step; once more stops at once", "warning"))
        elif done or deadline == math.inf or len(signals) > 1 or time.monotonic() > deadline:
            if done:
                ray.get(running)  # where it failed, that is what there is to say
            saved = "stopped, its last step is saved; the same command goes on from there"
            ended = "stopped" if deadline == math.inf else saved
            say(Line(f"signal {signals[0].name}: {ended if done else 'stopping now'}", "warning"))
            raise SystemExit(128 + signals[0])


def _answer(method: Any, signals: list[signal.Signals], limit_s: float) -> Any:
    """A trainer that holds the interpreter lock does not answer; a second signal does not wait for it."""
    import ray

    answer, deadline = method.remote(), time.monotonic() + limit_s
    while not ray.wait([answer], timeout=POLL_S)[0]:
        if len(signals) > 1:
            raise SystemExit(128 + signals[0])
        if time.monotonic() > deadline:
            raise Stalled(f"the trainer has not answered for {limit_s:g} s (tts.stall_s)")
    return ray.get(answer)


@contextmanager
def signals_noted() -> Iterator[list[signal.Signals]]:
    """SIGTERM and Ctrl-C are noted, to be acted upon between two calls of Ray's: inside one they get lost.

    Where Ctrl-C is ignored, as in what a script has put into the background, it stays so: it is the script's.
    """
    noted: list[signal.Signals] = []
    names = [name for name in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(name) != signal.SIG_IGN]
    before = [signal.signal(name, lambda number, _: noted.append(signal.Signals(number))) for name in names]
    try:
        yield noted
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)


def resume_target(config: DictConfig) -> str:
    """verl's ``trainer.resume_mode`` and ``resume_from_path`` as ``RunDir.start`` takes them."""
    return (
        config.trainer.resume_from_path if config.trainer.resume_mode == "resume_path" else config.trainer.resume_mode
    )


def root_cause(error: BaseException) -> BaseException:
    """The exception that a Ray call failed with, as it was raised in the other process."""
    from ray.exceptions import RayActorError, RayTaskError

    while isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause
    if isinstance(error, RayActorError):
        return ProcessDied(f"a process of the run is gone: {' '.join(str(error).split())[:300]}")
    return error


@contextmanager
def ray_cluster(config: DictConfig) -> Iterator[Path]:
    """A Ray cluster of this run alone, in a directory of its own, or the one that ``RAY_ADDRESS`` names.

    Yields the directory that processes of the run, on all nodes, write their stacks to.

    The environment of the workers travels as the job's runtime environment, so it reaches every process of the
    run on a cluster that was there before, too.
    """
    joins = bool(os.environ.get("RAY_ADDRESS"))
    kept = {} if joins or config.trainer.nnodes > 1 else KEPT_AT_HOME
    settings: dict[str, Any] = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)  # type: ignore[assignment]
    environment = settings.setdefault("runtime_env", {}).setdefault("env_vars", {})
    environment.update(WORKER_ENVIRONMENT | environment)
    # Short: the sockets below it may have paths of 107 characters at most.
    directory = Path(tempfile.mkdtemp(prefix="verl-tts-"))
    stacks_dir = Path(config.tts.output_dir).absolute() / STACKS_DIR
    try:
        # What a run that was killed has left there names processes that are gone, or are somebody else's by now.
        shutil.rmtree(stacks_dir, ignore_errors=True)
        stacks_dir.mkdir(parents=True, exist_ok=True)
        environment[stacks.DIRECTORY] = str(stacks_dir)
        # vLLM and others leave sockets and folders where temporary files go: there they are removed with the rest.
        (directory / "tmp").mkdir()
        environment.setdefault("TMPDIR", str(directory / "tmp"))
        wished = {name: os.environ[name] for name in kept if name in os.environ}
        with environment_with(kept | wished | RAY_ENVIRONMENT | environment):
            import ray  # which reads what is kept at home as it is imported

            stacks.register("driver")
            try:
                ray.init(**settings, **({} if joins else {"_temp_dir": str(directory)}))
            except ConnectionError as error:
                raise ConfigError(f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS')} cannot be joined: {error}") from error
            try:
                yield stacks_dir
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(stacks_dir, ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)  # Ray's own processes may still be closing their logs


def start_servers_early(config: DictConfig) -> list[Any]:
    """The rollout servers beside the trainer's own start, where they need not be told which device is whose."""
    from verl_tts.rollout.replica import start_server
    from verl_tts.rollout.spec import RolloutSpec

    spec = RolloutSpec.from_config(config)
    servers = [start_server(spec, rank) for rank in range(spec.servers or spec.actor_workers)]
    for server in servers:
        server.launch.remote()
    return servers


class Pulse(NamedTuple):
    """How the run goes, as the driver asks for it."""

    lines: list[Line]  # to show, since the last time
    stalled: str | None  # what hangs


class TaskRunner:
    """Lives in its own process, on the driver's node, for the length of the run."""

    def __init__(self, config: DictConfig, attempt: Attempt) -> None:
        stacks.register("trainer")
        self.config, self.attempt = config, attempt
        self._lines: list[Line] = []
        self._heartbeat = Heartbeat(self._say, config.tts.heartbeat_s, config.tts.stall_s)
        self._agent_loop: Any = None
        self._trainer: Any = None
        self._servers: list[Any] = []

    def run(self) -> None:
        self._heartbeat.start()
        tts = self.config.tts
        with self._heartbeat.phase("the start of the processes", max(tts.stall_s, tts.engine.startup_timeout_s)):
            trainer = self._set_up()
        self._trainer = trainer
        first, last = trainer.global_steps + 1, trainer.total_training_steps
        left = f"training from step {first} to {last}" if first <= last else "no step is left to train"
        self._say(f"ready: {left}")
        trainer.fit(self._agent_loop)
        trainer.logger.finish(exit_code=0)

    def _set_up(self) -> Any:
        from verl_tts import plugin

        plugin.import_modules(external_modules(self.config))
        plugin.check_registered()
        import transfer_queue as tq

        from verl_tts.report.trackers import prepare_tensorboard
        from verl_tts.rollout.agent_loop import AgentLoopManager
        from verl_tts.trainer import OmniTrainer

        config = self.config
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        run_dir = RunDir(config.tts.output_dir, attempt=self.attempt.number)
        self._agent_loop = AgentLoopManager(config, rewards=reward_manager(config), run_dir=run_dir)
        self._heartbeat.progress = self._agent_loop.progress
        scorer = self._agent_loop.probe()
        self._say(f"scorer {scorer.name or config.tts.reward.scorer_url}")
        if self.attempt.checkpoint is not None:
            # Again: a scorer may have been restarted with other settings.
            check_scorer(self.attempt.checkpoint, scorer, config)
        if config.tts.engine.starts_early:
            self._servers = start_servers_early(config)
        conditioner = check_prompts(config)
        if "tensorboard" in config.trainer.logger:
            prepare_tensorboard(run_dir.path / "tensorboard", self.attempt.step)
        tq.init(config.transfer_queue)
        trainer = OmniTrainer(
            config,
            run_dir=run_dir,
            attempt=self.attempt,
            scorer=scorer,
            say=self._say,
            heartbeat=self._heartbeat,
        )
        trainer.init()
        # Ray ends a named actor with the handle that made it, so the early ones stay where they are.
        replicas = trainer.llm_server_manager.get_replicas()
        self._servers = self._servers or [server for replica in replicas for server in replica.servers]
        self._agent_loop.connect(trainer.get_llm_client(), conditioner)
        return trainer

    def pulse(self) -> Pulse:
        lines, self._lines = self._lines, []
        return Pulse(lines, self._heartbeat.stalled)

    def stop_after_step(self) -> bool:
        """Ends the run at the end of the step in hand, saved; False where there is no step in hand."""
        if self._trainer is None or not self._trainer.is_training:
            return False
        self._trainer.stop_asked = True
        return True

    def shutdown(self) -> None:
        """Ends the engine's stages, which are not Ray's to end, and closes what is open."""
        import ray

        self._heartbeat.stop()
        ray.wait([server.shutdown.remote() for server in self._servers], num_returns=len(self._servers), timeout=20)
        if self._agent_loop is not None:
            self._agent_loop.close()

    def _say(self, line: Line | str) -> None:
        self._lines.append(Line(line) if isinstance(line, str) else line)


def check_prompts(config: DictConfig, rows: Iterable[PromptRow] | None = None) -> Any:
    """Every row, by default of both splits, as the policy will be given it; returns what turns a row into that.

    Raises ``DataError`` for a text of more than ``data.max_prompt_length`` tokens: it would not fit the engine.
    """
    from importlib import import_module

    from transformers import AutoTokenizer

    from verl_tts.config.model_dir import read_model_config
    from verl_tts.config.validate import data_files
    from verl_tts.data.prompts import read_prompts

    model, limit = config.actor_rollout_ref.model, config.data.max_prompt_length
    rollout = import_module(f"verl_tts.rollout.{model.model_type}")
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=False)
    conditioner = rollout.conditioner(config, read_model_config(model.path), tokenizer)
    if rows is None:
        rows = read_prompts(*data_files(config.data.train_files), *data_files(config.data.val_files))
    for row in rows:
        if (length := conditioner.length(row)) > limit:
            raise DataError(
                f"the prompt of row {row.id} has {length} tokens, data.max_prompt_length={limit}; "
                "raise the limit or shorten the text"
            )
    return conditioner
