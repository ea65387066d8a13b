"""What a person sees who types something wrong, or Ctrl-C at once."""

import builtins
from typing import Any

import pytest

from ops import main as command
from ops.start import EXIT_INTERRUPTED, main


def test_ctrl_c_during_the_imports_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback: the status says that it was interrupted."""
    ordinary = builtins.__import__

    def interrupted(name: str, *rest: Any) -> Any:
        if name == "ops.main":
            raise KeyboardInterrupt
        return ordinary(name, *rest)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_INTERRUPTED


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "--port", "abc"], "'abc' is not a whole number"),
        (["up", "--replicas", "x"], "'x' is not a whole number"),
        (["up", "--stub-tps=-5"], "'-5' is not a number of tokens per second"),
        (["up", "--stub-tps", "nan"], "'nan' is not a number of tokens per second"),
        (["keys", "create", "--user", "a", "--tier", "gold"], "'gold' is not one of paid, free, background"),
    ],
)
def test_a_wrong_argument_is_said_in_words(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names what was typed and what is taken, and no function of ours."""
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert says in capsys.readouterr().err
