"""One server, two forms: vLLM-Omni's OpenAI-style ``POST /v1/audio/speech``, and ``POST /generate`` beside it.

The server is vLLM-Omni's, with the stages of our rollouts; we add one route and leave few of its own (``routes.py``).
Its stages are children of this process, which ends them.
"""

import asyncio
import base64
import importlib
import io
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import numpy as np
import psutil
import soundfile
import yaml
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse

from verl_tts.errors import ConfigError, ProcessDied, TTSError, UserError
from verl_tts.rollout import server as rollout_server
from verl_tts.rollout.alone import temporary_directory
from verl_tts.rollout.seeds import SEED_BITS
from verl_tts.rollout.spec import RolloutSpec
from verl_tts.serving.generate_form import MAX_BODY_BYTES, Request, parse
from verl_tts.serving.routes import AnsweredAlone
from verl_tts.serving.speech import Speaker, one_line
from verl_tts.types import Given

MAX_PORT = 65535
POLL_S = 0.25  # between two questions whether the server answers
PENALISED = ("qwen3_tts",)  # MOSS's codes are drawn without a penalty, and its text may not have one alone
NOWHERE = "no-remote-recordings.invalid"  # the one host that vLLM may fetch recordings from


class GenerateForm:
    """The handler of ``POST /generate``."""

    def __init__(self, speaker: Speaker, references: Path | None, adapter: Any) -> None:
        self.speaker, self.references, self._adapter = speaker, references, adapter
        self.model_json = json.loads(Path(speaker.spec.model_path, "config.json").read_text())
        self._numbers = itertools.count()

    async def answer(self, http: HTTPRequest) -> JSONResponse:
        try:
            return JSONResponse(await self._answer(http))
        except UserError as error:
            return _error(400, one_line(error))
        except TTSError as error:
            return _error(500, one_line(error))

    async def _answer(self, http: HTTPRequest) -> dict[str, Any]:
        body = bytearray()
        async for chunk in http.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise ConfigError(f"the body is larger than {MAX_BODY_BYTES} bytes")
        try:
            content = json.loads(bytes(body))
        except (ValueError, RecursionError) as error:
            raise ConfigError("the body is not JSON") from error
        request = parse(content, self.references, self.speaker.spec.max_response_tokens)
        given = await asyncio.to_thread(self.speaker.prompt, request.speech)
        speaking = asyncio.create_task(self._speak(http.app.state.engine_client, request, given))
        gone = asyncio.create_task(_disconnected(http))
        try:
            await asyncio.wait((speaking, gone), return_when=asyncio.FIRST_COMPLETED)
            if not speaking.done():
                raise ConfigError("the client is gone")  # nobody reads it
            return speaking.result()
        finally:
            speaking.cancel()  # which ends the request in the engine
            gone.cancel()

    def ask(self, request: Request, given: Given) -> tuple[dict[str, Any], list[Any], int]:
        """The engine's prompt, the sampling parameters of its stages, and the seed behind them."""
        spec, sampling = self.speaker.spec, request.sampling
        seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
        settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        prompt, stages = self._adapter.ask(
            spec, self.model_json, given.text_ids, settings, seed, **dict(given.request())
        )
        if spec.model in PENALISED:
            stages[0].repetition_penalty = sampling.repetition_penalty
        stages[0].max_tokens = sampling.max_frames
        return prompt, stages, seed

    async def _speak(self, engine: Any, request: Request, given: Given) -> dict[str, Any]:
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt, stages, seed = self.ask(request, given)
        name = f"generate-{next(self._numbers)}"
        outputs: dict[int, Any] = {}
        try:
            async for output in engine.generate(
                prompt=prompt,
                sampling_params_list=stages,
                request_id=name,
            ):
                outputs[output.stage_id] = output
        except EngineDeadError as error:
            raise ProcessDied("a stage of the engine died; restart the server") from error
        rollout, waveform = self._adapter.read(outputs, seed, name, self.speaker.spec, self.model_json)
        clip = io.BytesIO()
        soundfile.write(clip, np.asarray(waveform.samples_S), waveform.sample_rate_hz, format="WAV")
        reason = "stop" if rollout.stop_reason == "eos" else "length"
        return {
            "text": base64.b64encode(clip.getvalue()).decode(),
            "meta_info": {
                "id": name,
                "finish_reason": {"type": reason},
                "completion_tokens": len(rollout.tokens_T),
                "seed": seed,
            },
        }


async def _disconnected(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ``ConfigError``."""
    if not host:
        raise ConfigError("--host is empty; name an address, 127.0.0.1 for this machine alone, 0.0.0.0 for all")
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"--port {port} has to be a whole number from 0 to {MAX_PORT}")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from error


def serve(
    speaker: Speaker, listener: socket.socket, references: Path | None, ready: Callable[[], None], log: Path
) -> None:
    """Answers until SIGTERM or SIGINT; calls ``ready`` once it does. ``log`` is what goes with a start cut short.

    Raises ``ProcessDied`` if the engine does not start, or dies.
    """
    spec = speaker.spec
    adapter = importlib.import_module(f"verl_tts.rollout.{spec.model}")
    adapter.register_pipeline()
    if spec.stages_side_by_side:
        from verl_tts.compat import vllm_omni_parallel_stages

        vllm_omni_parallel_stages.apply()
    from vllm_omni.entrypoints.openai import api_server

    from verl_tts.serving import openai_form

    form = GenerateForm(speaker, references, adapter)
    openai_form.register(form)
    api_server.router.add_api_route("/generate", form.answer, methods=["POST"], response_model=None)
    with temporary_directory() as scratch:
        stages = scratch / "stages.yaml"
        stages.write_text(yaml.safe_dump(adapter.topology(spec, form.model_json), sort_keys=False))
        with ended_by_signal(scratch, log):
            try:
                asyncio.run(_run(api_server, _arguments(spec, stages, listener), listener, ready))
            except (RuntimeError, ValueError, OSError) as error:
                raise ProcessDied(f"the engine did not start: {' '.join(str(error).split())[:300]}") from error
            finally:
                _end_children()


@contextmanager
def ended_by_signal(*leftovers: Path) -> Iterator[None]:
    """A signal while the engine is starting ends its stages and this process; later vLLM's server ends itself.

    At once, as threads of vLLM-Omni's start outlive an exception; ``leftovers`` are removed first.
    """

    def end(number: int, _: FrameType | None) -> None:
        _end_children()
        for path in leftovers:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _run(api_server: Any, args: Any, listener: socket.socket, ready: Callable[[], None]) -> None:
    asked = Asked()
    told = asyncio.create_task(_tell(address(listener), ready, asked))
    try:
        await api_server.omni_run_server_worker(address(listener), listener, args)
    finally:
        told.cancel()
    if asked.notices and not asked.to_end:  # vLLM's server ends by itself once a stage is gone
        raise ProcessDied("a stage of the engine died, and the server ended with it; start it again")


class Asked:
    """Whether a signal has asked the server to end, noticed once it answers; uvicorn's handlers still handle it."""

    def __init__(self) -> None:
        self.notices, self.to_end = False, False

    def notice(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._before(signal.getsignal(number)))
        self.notices = True

    def _before(self, handler: Any) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            self.to_end = True
            handler(number, frame)

        return handle


async def _tell(url: str, ready: Callable[[], None], asked: Asked) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=5.0) as client:
        while True:
            with suppress(httpx.HTTPError):
                if (await client.get("/health")).status_code == 200:
                    asked.notice()
                    return ready()
            await asyncio.sleep(POLL_S)


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _arguments(spec: RolloutSpec, stages: Path, listener: socket.socket) -> Any:
    """What ``vllm serve MODEL --omni`` would have read from these words."""
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand
    from vllm_omni.utils.tracking_parser import TrackingArgumentParser

    host, port = listener.getsockname()[:2]
    words = ["serve", spec.model_path, "--omni", "--host", host, "--port", str(port), "--deploy-config", str(stages)]
    words += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    words += [
        "--stage-init-timeout",
        str(int(spec.startup_timeout_s)),
        "--init-timeout",
        str(int(spec.startup_timeout_s)),
    ]
    words += ["--middleware", f"{AnsweredAlone.__module__}.{AnsweredAlone.__name__}"]
    # vLLM would fetch any address that a client names: a server that reaches more than its client is a way in.
    words += ["--allowed-media-domains", NOWHERE]
    parser = TrackingArgumentParser()
    command = OmniServeCommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(words)
    command.validate(args)
    args.model = args.model_tag
    return args


def _end_children() -> None:
    """vllm-omni 0.24 leaves stages behind that are still starting."""
    children = rollout_server.started_here()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=rollout_server.STAGE_END_S)
