"""The exception tree.

ChorusError
├── ConfigError            a setting, file or port is wrong; the sentence says what to do
│   └── ModelFileError     a weights or tokenizer file is malformed
├── RefusedError           a demand that was said no to; carries a Refusal
├── EngineError            the engine process is gone, or never came up
├── TokenLogError          an entry that the rules of the token log forbid
├── IllegalEventError      a state machine's table has no such event in its state
├── ValkeyAwayError        Valkey does not answer, or not in time: go on without
├── LogGoneError           a log whose head, or what was already read of it, is no longer there
└── BusError
    ├── BusTimeoutError    no answer inside the deadline; the effect is unknown
    ├── NoRespondersError  nobody listens on the subject
    ├── WrongLastSequenceError   a conditional append lost: another entry stands before it
    ├── StreamFullError    a bounded stream said no
    └── BusClosedError     the connection is gone for good
"""

from shared.outcomes import Refusal


class ChorusError(Exception):
    """Whatever Chorus itself raises."""


class ConfigError(ChorusError):
    pass


class ModelFileError(ConfigError):
    pass


class RefusedError(ChorusError):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class EngineError(ChorusError):
    pass


class TokenLogError(ChorusError):
    pass


class IllegalEventError(ChorusError):
    pass


class ValkeyAwayError(ChorusError):
    pass


class LogGoneError(ChorusError):
    pass


class BusError(ChorusError):
    pass


class BusTimeoutError(BusError):
    pass


class NoRespondersError(BusError):
    pass


class WrongLastSequenceError(BusError):
    def __init__(self, subject: str, last_sequence: int | None = None) -> None:
        super().__init__(f"another entry stands last on {subject}")
        self.last_sequence = last_sequence


class StreamFullError(BusError):
    pass


class BusClosedError(BusError):
    pass
