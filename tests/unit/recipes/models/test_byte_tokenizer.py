"""The byte tokenizer has a token for each byte, special tokens, and a chat template."""

from hypothesis import given
from hypothesis import strategies as st

from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text(st.characters(codec="utf-8")))
def test_text_is_its_bytes(text):
    """A text has one token per byte, and is decoded unchanged."""
    ids = TOKENIZER(text)["input_ids"]

    assert len(ids) == len(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_the_assistants_words_are_marked():
    """The chat template marks the assistant's tokens, including the end token."""
    messages = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    encoded = TOKENIZER.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    marked = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)

    assert TOKENIZER.decode([token for token, mask in marked if mask]) == "b<|end|>"
