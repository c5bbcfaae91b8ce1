"""A Python function in place of a scorer server: ``reward.custom_reward_function``.

    path           file path, or ``pkg://package.module``
    name           the function in it
    reward_kwargs  what it is given beside the clip

It is called as ``fn(samples_S, sample_rate_hz, prompt, metadata, **reward_kwargs)``, plain or async, and
returns a number or a mapping with ``score`` in it: the rules of the protocol's answer, with NumPy's scalars
allowed. What it raises ends the run. Legend: ``S`` audio sample.
"""

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import orjson

from verl_tts.errors import ConfigError, ScorerError, ScorerRejected, ScorerUnavailable
from verl_tts.rewards.protocol import Clip, ScorerInfo, excerpt, read_answer
from verl_tts.types import Scalar, Score, Waveform

PACKAGE_PREFIX = "pkg://"


class FunctionScorer:
    """Scores with a function in this process; the counterpart of ``ScorerClient``."""

    def __init__(
        self, path: str, name: str, kwargs: Mapping[str, Any], *, timeout_s: float, max_in_flight: int
    ) -> None:
        module = _load_module(path)
        function = getattr(module, name, None)
        if not callable(function):
            raise ConfigError(f"reward.custom_reward_function.name: {path} has no function {name!r}")
        _check_call(f"{path}:{name}", function, kwargs)
        self._label = f"{path}:{name}"
        self._function: Callable[..., Any] = function
        self._kwargs = dict(kwargs)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_in_flight)
        self._fingerprint = _fingerprint(self._label, module, self._kwargs)

    async def probe(self) -> ScorerInfo:
        return ScorerInfo(name=self._label, fingerprint=self._fingerprint)

    async def aclose(self) -> None:
        """Nothing is open; a call that still runs ends with the process."""

    async def score(self, waveform: Waveform, prompt: str, metadata: Mapping[str, Scalar]) -> Score:
        """The function's score for one clip.

        Raises ScorerRejected for what the function raises, ScorerProtocolError for an answer that is none,
        ScorerUnavailable if it takes longer than ``tts.reward.timeout_s``.
        """
        clip = Clip(waveform, prompt, metadata)
        try:
            async with self._slots:
                answer = await self._call(clip)
            return read_answer(_plain(answer), clip)
        except ScorerError as error:
            raise type(error)(f"{self._label}: sample {clip.id!r} has no score: {error}") from error

    async def _call(self, clip: Clip) -> Any:
        # A copy: the clip is still to be written to disk, whatever the function does to its samples.
        arguments = (clip.waveform.samples_S.copy(), clip.waveform.sample_rate_hz, clip.prompt, dict(clip.metadata))
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                if inspect.iscoroutinefunction(self._function):
                    return await self._function(*arguments, **self._kwargs)
                answer = await _in_daemon_thread(lambda: self._function(*arguments, **self._kwargs))
                return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:  # a user's function may raise anything, and anything it raises ends the run
            if isinstance(error, TimeoutError) and deadline.expired():
                raise ScorerUnavailable(f"no result within {self._timeout_s:g} s") from error
            raise ScorerRejected(f"it raised {type(error).__name__}: {excerpt(error)}") from error


async def _in_daemon_thread(call: Callable[[], Any]) -> Any:
    """Await ``call`` in a thread of its own.

    A daemon thread, since a function that never returns must not keep the process from ending; the threads
    of an executor are waited for at exit.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future = loop.create_future()

    def deliver(setter: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            setter(value)

    def work() -> None:
        try:
            setter, value = result.set_result, call()
        except Exception as error:  # noqa: BLE001  carried over to the event loop, not swallowed
            setter, value = result.set_exception, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, setter, value)

    threading.Thread(target=work, name="scoring function", daemon=True).start()
    return await result


def _plain(answer: Any) -> Any:
    """The answer as the protocol has it: a bare number becomes ``{"score": number}``, NumPy scalars Python ones."""
    items = answer if isinstance(answer, Mapping) else {"score": answer}
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in items.items()}


# --- loading ---------------------------------------------------------------------------------------------------------


def _load_module(path: str) -> ModuleType:
    setting = f"reward.custom_reward_function.path={path}"
    try:
        if path.startswith(PACKAGE_PREFIX):
            return importlib.import_module(path.removeprefix(PACKAGE_PREFIX))
        if not Path(path).is_file():
            raise ConfigError(f"{setting}: no such file; give a .py file, or pkg://MODULE for an installed module")
        # A name from the path: two files may both be called reward.py.
        name = f"verl_tts_scoring_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{setting}: not a Python file; its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses and pickle look for it
        spec.loader.exec_module(module)
        return module
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise ConfigError(f"{setting} cannot be imported: {type(error).__name__}: {excerpt(error)}") from error


def _check_call(label: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(None, 0, "", {}, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{label}{signature} cannot be called as fn(samples_S, sample_rate_hz, prompt, metadata, "
            f"**reward_kwargs) with reward_kwargs {sorted(kwargs)}: {error}"
        ) from error


def _fingerprint(label: str, module: ModuleType, kwargs: Mapping[str, Any]) -> str:
    """SHA-256 over the function's file and its arguments, not over where the file lies."""
    source = Path(module.__file__).read_bytes() if module.__file__ else b""
    name = label.rpartition(":")[2]
    settings = orjson.dumps([name, dict(kwargs)], option=orjson.OPT_SORT_KEYS, default=repr)
    return hashlib.sha256(settings + source).hexdigest()
