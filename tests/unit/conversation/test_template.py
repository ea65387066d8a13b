"""Chat templates: what stands around people's words, rendered in a sandbox without them."""

import pytest

from services.conversation.template import ChatTemplate, TemplateError
from shared.errors import ModelFileError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_is_split_at_the_messages() -> None:
    """Literals and slots alternate, in the order of the messages."""
    rendered = ChatTemplate(CHATML).render(("developer", "user"))
    assert rendered.literals == (
        "<|im_start|>system\n",
        "<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    )
    assert rendered.slots == (0, 1)


def test_a_default_instruction_of_the_template_is_kept() -> None:
    """What a template says by itself is a literal, and goes when the conversation has its own."""
    default = "{% if messages[0]['role'] != 'system' %}{{ '<s>be kind</s>' }}{% endif %}" + CHATML
    assert ChatTemplate(default).render(("user",)).literals[0] == "<s>be kind</s><|im_start|>user\n"
    assert ChatTemplate(default).render(("system",)).literals[0] == "<|im_start|>system\n"


def test_a_template_that_reorders_or_repeats_messages_says_so() -> None:
    """Slots name the message that stands there, however the template orders them."""
    source = "{{ messages[-1]['content'] }}|{% for m in messages %}{{ m['content'] }};{% endfor %}"
    rendered = ChatTemplate(source).render(("user", "user"))
    assert rendered.slots == (1, 0, 1)
    assert rendered.literals == ("", "|", ";", ";")


def test_whether_a_template_trims_is_known() -> None:
    """A template that strips its contents is found out, and its literals hold no trace of the mark."""
    trimming = ChatTemplate("{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}")
    assert trimming.trims
    assert trimming.render(("user",)).literals == ("[", "]")
    assert not ChatTemplate(CHATML).trims


def test_roles_a_template_does_not_take_are_an_error_in_its_own_words() -> None:
    """`raise_exception` of a template comes out as TemplateError with its text."""
    source = "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ raise_exception('no assistants') }}{% endif %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(TemplateError, match="no assistants"):
        ChatTemplate(source).render(("assistant",))


@pytest.mark.parametrize(
    "source",
    [
        "{% for",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ missing.attribute }}",
        "{% for i in range(10000000000) %}{% endfor %}",
    ],
)
def test_a_broken_or_hostile_template_is_refused_at_load(source: str) -> None:
    """A template that cannot be parsed, or that reaches for what the sandbox forbids, is a ModelFileError."""
    with pytest.raises(ModelFileError):
        ChatTemplate(source)
