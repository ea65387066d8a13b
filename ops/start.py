"""Where the `chorus` command begins: Ctrl-C is quiet from the first moment, while the command is still imported."""

# ruff: noqa: PLC0415 - the import is what may be interrupted
import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Entry point."""
    try:
        from ops.main import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
