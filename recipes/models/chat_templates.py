"""Chat templates by name: those that TRL ships, and ChatML for any tokenizer."""

import importlib.util
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mfwrap.names import hint
from mfwrap.recipes.data.places import check_place, is_folder
from mfwrap.recipes.models.checkpoint import TOKENIZER_FILES

_CHATML = "chatml"

_CHATML_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + END }}{%- endgeneration %}"
    "{%- else %}{{- message['content'] + END }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""``END`` is replaced for the tokenizer."""

_END = "<|im_end|>"

CHOICES = (
    "chatml, the name of a template of TRL (such as gemma3, llama3, phi3 or qwen3), a Jinja file "
    "(*.jinja), or a tokenizer that has a template (org/name or a folder)"
)
"""What `check_template` accepts, for messages."""


def template_names() -> list[str]:
    """Return the names of the chat templates that a recipe may name.

    They are ``chatml``, and the templates of the installed TRL that have a variant for training,
    which marks the words of the assistant.
    """
    return [_CHATML, *(file.stem for file in _trl_templates() if _for_training(file).is_file())]


def check_template(name: str) -> None:
    """Check the name of a chat template.

    Args:
        name: One of `template_names`, a Jinja file, or a tokenizer: a folder or a name on the hub.

    Raises:
        ValueError: If `name` is something else.
    """
    known = template_names()
    if name in known or _is_jinja(name):
        return
    if "/" in name or is_folder(name):
        check_place("chat_template", name, TOKENIZER_FILES, "a folder with a tokenizer")
        return
    msg = f"`chat_template` must be {CHOICES}, got {name!r:.80}{hint(name, known)}"
    raise ValueError(msg)


def is_on_hub(name: str) -> bool:
    """Return whether the checked name of a template is that of a tokenizer on the hub."""
    return not (name in template_names() or _is_jinja(name) or is_folder(name))


def set_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give a tokenizer a chat template.

    The token with which the template ends an answer becomes the tokenizer's end-of-text token, so
    that a generation stops there.

    Args:
        tokenizer: The tokenizer, which is changed.
        name: Checked name of the template; see `check_template`.

    Raises:
        ValueError: If the template fails with this tokenizer, or ends answers with something that
            is no token of it.
    """
    tokenizer.chat_template = template_text(tokenizer, name)
    try:
        shown, end = _end_of_answer(tokenizer)
    except TemplateError as error:
        msg = f"`chat_template` must fit the tokenizer, got {name!r}, which fails: {error}"
        raise ValueError(msg) from error
    if end is not None:
        tokenizer.eos_token = end
    elif name in template_names():
        says = f"{name!r}, whose end of an answer, {shown!r}, is no token of the tokenizer"
        hinted = "" if name == _CHATML else "; chatml ends answers with the tokenizer's own token"
        msg = f"`chat_template` must fit the tokenizer, got {says}{hinted}"
        raise ValueError(msg)


def template_text(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """Return the text of a chat template.

    Args:
        tokenizer: Tokenizer that the template is for.
        name: Checked name of the template; see `check_template`.
    """
    if _is_jinja(name):
        return Path(name).read_text(encoding="utf-8")
    if name == _CHATML:
        ids = tokenizer("a")["input_ids"]
        begins = bool(ids) and ids[0] == tokenizer.bos_token_id
        end = f"'{_END}'" if _END in tokenizer.get_vocab() else "eos_token"
        text = _CHATML_TEMPLATE.replace("END", end)
        return f"{'{{- bos_token }}' if begins else ''}{text}"
    shipped = {file.stem: file for file in _trl_templates()}
    if name in shipped:
        return shipped[name].read_text(encoding="utf-8")
    found: str = AutoTokenizer.from_pretrained(name).get_chat_template()
    return found


def _end_of_answer(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str | None]:
    """Return what the template writes after an answer, and the token with which that begins.

    The token is ``None`` if this is no token of its own, but the beginning of a word.
    """
    answer = "answer"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    end = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(answer)[2]
    ids = tokenizer(end, add_special_tokens=False)["input_ids"]
    if not ids or ids[0] not in tokenizer.get_added_vocab().values():
        return end, None
    return end, str(tokenizer.convert_ids_to_tokens(ids[0]))


def _is_jinja(name: str) -> bool:
    return name.endswith((".jinja", ".j2")) and Path(name).is_file()


def _trl_templates() -> list[Path]:
    found = importlib.util.find_spec("trl")  # does not import it, which would take seconds
    places = found.submodule_search_locations if found is not None else None
    return sorted(
        file for place in places or () for file in Path(place).glob("chat_templates/*.jinja")
    )


def _for_training(file: Path) -> Path:
    return file.with_name(f"{file.stem}_training.jinja")
