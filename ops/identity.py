"""Whom a child process runs as. PostgreSQL refuses to run as root, so root's servers drop to another user.

Root's files may lie where that user cannot go (under /root, or in an environment made with umask 077). Then the
child keeps one capability of root's, the one that passes file permissions, and nothing else.
"""

import ctypes
import os
import pwd
import signal
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError

_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_CAP_DAC_OVERRIDE = 1
_CAPABILITY_VERSION_3 = 0x20080522


@dataclass(frozen=True)
class Identity:
    """A user to drop to. `pass_permissions` keeps the capability to pass file permissions."""

    uid: int
    gid: int
    pass_permissions: bool = False


def unprivileged(reach: Iterable[Path], owner_of: Path) -> Identity | None:
    """Whom to drop to when we are root, else None. `reach` are files the child must get at.

    The owner of `owner_of` when it exists already (an earlier start chose him), else the user nobody.
    """
    if os.geteuid() != 0:
        return None
    uid = owner_of.stat().st_uid if owner_of.exists() else 0
    try:
        user = pwd.getpwuid(uid) if uid else pwd.getpwnam("nobody")
    except KeyError as error:
        raise ConfigError(
            f"PostgreSQL refuses to run as root, and there is no user {uid or 'nobody'} to drop to: "
            "start Chorus as an ordinary user, or give CHORUS_POSTGRES_URL"
        ) from error
    barred = [path for path in reach if not _may_read(path.resolve(), user.pw_uid, user.pw_gid)]
    if barred and not _we_pass_permissions():
        raise ConfigError(
            f"PostgreSQL refuses to run as root, and the user {user.pw_name} may not enter {barred[0]}: "
            "choose a --data folder that every user may enter, or start Chorus as an ordinary user"
        )
    return Identity(user.pw_uid, user.pw_gid, pass_permissions=bool(barred))


def _we_pass_permissions() -> bool:
    """Whether we hold the capability that a child would need; a container may have taken it from root."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    held = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(held, 16) >> _CAP_DAC_OVERRIDE & 1)


def _may_read(path: Path, uid: int, gid: int) -> bool:
    """Whether the mode bits let that user come to `path` and read it; access lists are not looked at."""
    needs = [(parent, 0o1) for parent in path.parents] + [(path, 0o5)]
    return all(_grants(place.stat(), bits, uid, gid) for place, bits in needs if place.exists())


def _grants(status: os.stat_result, bits: int, uid: int, gid: int) -> bool:
    shift = 6 if status.st_uid == uid else 3 if status.st_gid == gid else 0
    return (stat.S_IMODE(status.st_mode) >> shift) & bits == bits


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapData(ctypes.Structure):
    _fields_ = [
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    ]


def before_exec(identity: Identity | None, death_signal: signal.Signals) -> Callable[[], None]:
    """What a child does between fork and exec: drop to `identity`, and ask to be signalled when we die.

    Everything is looked up here, in the parent; the child only makes system calls.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    prctl = getattr(libc, "prctl", None)  # Linux; elsewhere a child outlives a killed parent until the next start
    parent = os.getpid()

    def call(function: Callable[..., int], *args: object) -> None:
        if function(*args) != 0:
            raise OSError(ctypes.get_errno(), "a child could not take its identity")

    def become(who: Identity) -> None:
        os.setgroups([])
        os.setgid(who.gid)
        if who.pass_permissions and prctl is not None:
            call(prctl, _PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setuid(who.uid)
        if who.pass_permissions and prctl is not None:
            only = 1 << _CAP_DAC_OVERRIDE
            data = (_CapData * 2)(_CapData(only, only, only), _CapData(0, 0, 0))
            call(libc.capset, ctypes.byref(_CapHeader(_CAPABILITY_VERSION_3, 0)), data)
            call(prctl, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_OVERRIDE, 0, 0)

    def prepare() -> None:
        if identity is not None:
            become(identity)
        if prctl is not None:  # after the change of user, which clears it
            call(prctl, _PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
            if os.getppid() != parent:  # we died before the call
                os._exit(1)

    return prepare
