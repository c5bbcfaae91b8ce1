"""Every error that a run can end in, and the exit code that it ends with.

    TTSError                      1   a bug of ours, if raised as such
    +-- UserError                 2   the input is wrong; nothing was started
    |   +-- ConfigError               a setting: unknown, impossible, contradictory
    |   +-- DataError                 a row, a column, a speaker embedding
    |   +-- CheckpointError           a model directory or a training checkpoint
    |   +-- RegistrationError         a part of ours could not be imported or registered
    +-- RunStopped                3   a run that had started was ended on purpose
        +-- ScorerError               carries what the protocol asks for: URL, sample, attempts, answer
        |   +-- ScorerUnavailable     nobody answered in time
        |   +-- ScorerRejected        the scorer refused the request or reported an error
        |   +-- ScorerProtocolError   the answer is not one that the protocol allows
        +-- GateError                 a check during the run said stop
        +-- RolloutError              a rollout failed, or its parts do not fit together
        +-- WeightSyncError           weights did not all arrive in the rollout engine
        +-- ProcessDied               a worker, a stage or a server is gone
        +-- Stalled                   nothing has moved for longer than a setting allows

Ray pickles exceptions between processes: each takes exactly one argument, the message, so that it
arrives as it was raised. The message is one line: what is wrong, the value, the limit, the remedy.
"""


class TTSError(Exception):
    """Root of the tree; ``exit_code`` is what the command line ends with."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)


class UserError(TTSError):
    exit_code = 2


class ConfigError(UserError):
    pass


class DataError(UserError):
    pass


class CheckpointError(UserError):
    pass


class RegistrationError(UserError):
    pass


class RunStopped(TTSError):
    exit_code = 3


class ScorerError(RunStopped):
    pass


class ScorerUnavailable(ScorerError):
    pass


class ScorerRejected(ScorerError):
    pass


class ScorerProtocolError(ScorerError):
    pass


class GateError(RunStopped):
    pass


class RolloutError(RunStopped):
    pass


class WeightSyncError(RunStopped):
    pass


class ProcessDied(RunStopped):
    pass


class Stalled(RunStopped):
    pass
