"""A tokenizer that needs no download: one token per byte of UTF-8."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|reply|>' }}{% endif %}"
    "{% endfor %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 bytes and five special tokens, with a chat template.

    The padding token is ``<|pad|>``, the end-of-text token ``<|end|>``.

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> len(tokenizer), len(tokenizer("naïve")["input_ids"])
        (261, 6)
        >>> tokenizer.decode(tokenizer("naïve")["input_ids"])
        'naïve'
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",  # noqa: S106  (not a password)
        eos_token="<|end|>",  # noqa: S106  (not a password)
        extra_special_tokens=["<|system|>", "<|user|>", "<|reply|>"],
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = _CHAT_TEMPLATE
    return made
