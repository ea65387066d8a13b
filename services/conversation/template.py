"""A model's chat template, rendered in jinja2's sandbox without a word of any person in it.

Each message's content is a slot mark that no text can contain by chance; what was rendered is split at the marks. So
the template decides what stands around the words, and the words decide nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared import clock
from shared.errors import ModelFileError

_PAD = "\x1f"  # white space to a template that trims, and to nobody else
# A developer's word is a system word to models that know only these roles.
_ROLE_NAMES = {"developer": "system"}


class TemplateError(Exception):
    """The template does not take these roles in this order; the text is the template's own."""


@dataclass(frozen=True)
class Rendered:
    """`literals[0] slot literals[1] ...`; `slots` are places in the roles that were rendered."""

    literals: tuple[str, ...]
    slots: tuple[int, ...]


class ChatTemplate:
    """Raises ModelFileError when `source` is no template or cannot take a single user message."""

    def __init__(self, source: str, *, eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _refuse
        self._constants = {"bos_token": "", "eos_token": eos_token, "add_generation_prompt": True}
        self._mark = clock.random_token()
        self._split = re.compile(f"{_PAD}?{self._mark}-([0-9]+)-{_PAD}?")
        try:
            self._template = environment.from_string(source)
            padded = self._raw(("user",))
        except (jinja2.TemplateError, TemplateError) as error:
            raise ModelFileError(f"the model's chat template cannot be used: {error}. Choose another file.") from error
        self.trims = _PAD not in padded  # white space around the words goes; whoever encodes them must take it off

    def render(self, roles: Sequence[str]) -> Rendered:
        """The template around messages of these roles, with the start of the next reply after them."""
        parts = self._split.split(self._raw(roles))
        return Rendered(literals=tuple(parts[0::2]), slots=tuple(int(place) for place in parts[1::2]))

    def _raw(self, roles: Sequence[str]) -> str:
        messages = [
            {"role": _ROLE_NAMES.get(role, role), "content": f"{_PAD}{self._mark}-{place}-{_PAD}"}
            for place, role in enumerate(roles)
        ]
        try:
            return self._template.render(messages=messages, **self._constants)
        except TemplateError:
            raise
        except Exception as error:  # a template's own code may raise anything
            raise TemplateError(f"{type(error).__name__}: {error}") from error


def _refuse(message: str) -> NoReturn:
    """What templates call on a conversation they do not take."""
    raise TemplateError(message)
