"""Tiny models and data sets in folders that have the names which the scripts load from the Hub.

transformers and datasets look for a folder of this name first. So a script that runs beside these
folders loads them, without a change of its text and without network.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import ClassLabel, Dataset, Features, List, Value, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["make_hub"]

_TEXT = (
    "a the one two red blue green small large old new cat dog bird fish house tree river city man "
    "woman child sees finds eats likes moves opens closes near under over with and but not very "
    "today here there slowly quickly why what who is was does"
)
_WORDS = _TEXT.split()
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>", "<|user|>", "<|assistant|>"]
_VOCABULARY = {word: index for index, word in enumerate([*_SPECIAL, *_WORDS, *".,?:#!"])}
_CHAT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}</s>{% endgeneration %}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ROWS = 48
"""Rows of the training part of each data set."""
_HELD_OUT = 16
"""Rows of each other part."""


def make_hub(folder: Path) -> None:
    """Write all models and data sets.

    Args:
        folder: Folder that gets a folder for each model and data set.
    """
    disable_progress_bars()
    for seed, (name, make) in enumerate(_MODELS.items()):
        torch.manual_seed(seed)
        model, tokenizer = make()
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, configurations in _DATA.items():
        _write_data(folder / name, configurations)
    _write_phrases(folder / "temp" / "data" / "FinancialPhraseBank-v1.0")
    (folder / "rewards.py").write_text(_REWARDS, encoding="utf-8")


_REWARDS = '''\
"""A reward for the scripts that learn from rewards."""


def letters(completions, **others):
    """Return the number of different letters of each completion."""
    return [len(set(str(completion))) / 10 for completion in completions]
'''


# Models


def _tokenizer(*, encoder: bool = False, end: bool = False, types: bool = False) -> Any:
    """Return a tokenizer of words.

    Args:
        encoder: Whether a text begins with ``[CLS]`` and ends with ``[SEP]``.
        end: Whether a text ends with ``</s>``.
        types: Whether the tokenizer returns ``token_type_ids``.
    """
    tokenizer = Tokenizer(models.WordLevel(_VOCABULARY, unk_token="[UNK]"))  # noqa: S106  (a token, not a password)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if encoder:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(token, _VOCABULARY[token]) for token in ("[CLS]", "[SEP]")],
        )
    if end:
        tokenizer.post_processor = TemplateProcessing(
            single="$A </s>",
            pair="$A </s> $B </s>",
            special_tokens=[("</s>", _VOCABULARY["</s>"])],
        )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    special |= {"cls_token": "[CLS]", "sep_token": "[SEP]"} if encoder else {}
    special |= {} if encoder else {"eos_token": "</s>"}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        model_input_names=names if types else [names[0], names[2]],
        extra_special_tokens=["<|user|>", "<|assistant|>"],
        **special,
    )
    made.chat_template = None if encoder or end else _CHAT
    return made


def _encoder(kind: str, **settings: Any) -> Callable[[], tuple[PreTrainedModel, Any]]:
    """Return what makes an encoder with a head for masked words.

    Args:
        kind: Name of the architecture, such as "Bert".
        **settings: Settings of the configuration.
    """

    def make() -> tuple[PreTrainedModel, Any]:
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=len(_VOCABULARY), pad_token_id=0, **settings
        )
        model = getattr(transformers, f"{kind}ForMaskedLM")(config)
        return model, _tokenizer(encoder=True, types=kind == "Bert")

    return make


_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
}
_bert = _encoder("Bert", **_SIZES)
_roberta = _encoder("Roberta", **_SIZES, type_vocab_size=1)
_distilbert = _encoder(
    "DistilBert", dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=80
)


def _decoder(kind: str, **settings: Any) -> Callable[[], tuple[PreTrainedModel, Any]]:
    """Return what makes a decoder."""

    def make() -> tuple[PreTrainedModel, Any]:
        ends = _VOCABULARY["</s>"]
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=len(_VOCABULARY),
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=ends,
            **settings,
        )
        suffix = "LMHeadModel" if kind in {"GPT2", "XLNet"} else "ForCausalLM"
        tokenizer = _tokenizer(encoder=kind == "XLNet")
        return getattr(transformers, f"{kind}{suffix}")(config), tokenizer

    return make


_llama = _decoder("Llama", **_SIZES, num_key_value_heads=2)
_qwen = _decoder("Qwen2", **_SIZES, num_key_value_heads=2)
_gpt2 = _decoder("GPT2", n_embd=32, n_layer=2, n_head=2, n_positions=80)
_xlnet = _decoder("XLNet", d_model=32, n_layer=2, n_head=2, d_inner=64)


def _t5() -> tuple[PreTrainedModel, Any]:
    """Return an encoder with a decoder."""
    config = transformers.T5Config(
        vocab_size=len(_VOCABULARY),
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=_VOCABULARY["</s>"],
    )
    return transformers.T5ForConditionalGeneration(config), _tokenizer(end=True)


_MODELS: dict[str, Callable[[], tuple[PreTrainedModel, Any]]] = {
    "FacebookAI/roberta-base": _roberta,
    "HuggingFaceTB/SmolLM-360M": _llama,
    "Qwen/Qwen2-0.5B": _qwen,
    "Qwen/Qwen2-1.5B": _qwen,
    "bert-base-cased": _bert,
    "distilbert/distilbert-base-uncased": _distilbert,
    "distilbert/distilroberta-base": _roberta,
    "google-bert/bert-base-uncased": _bert,
    "google-t5/t5-small": _t5,
    "meta-llama/Llama-3.2-1B": _llama,
    "naver/splade-cocondenser-ensembledistil": _bert,
    "nreimers/TinyBERT_L-4_H-312_v2": _bert,
    "openai-community/gpt2": _gpt2,
    "roberta-base": _roberta,
    "sentence-transformers/all-distilroberta-v1": _roberta,
    "sentence-transformers/stsb-roberta-base-v2": _roberta,
    "t5-base": _t5,
    "xlnet/xlnet-base-cased": _xlnet,
}


# Data sets


class _Text:
    """Sentences of random words, the same ones at each run."""

    def __init__(self) -> None:
        self.random = random.Random(0)  # noqa: S311  (not for cryptography)

    def words(self, least: int, most: int) -> list[str]:
        """Return random words."""
        return self.random.choices(_WORDS, k=self.random.randint(least, most))

    def sentence(self) -> str:
        """Return a sentence of 4 to 9 words."""
        return " ".join(self.words(4, 9)) + " ."

    def label(self, kinds: int) -> int:
        """Return a number from 0 to below `kinds`."""
        return self.random.randrange(kinds)

    def score(self) -> float:
        """Return a number from 0 to 1."""
        return round(self.random.random(), 3)


_Row = Callable[[_Text, int], dict[str, Any]]
_Parts = Sequence[str]
_TRAIN_AND_TEST = ("train", "test")
_THREE = ("train", "validation", "test")
_DEV = ("train", "dev", "test")


def _classes(*names: str) -> ClassLabel:
    return ClassLabel(names=list(names))


def _turns(text: _Text) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": text.sentence()},
        {"role": "assistant", "content": text.sentence()},
    ]


def _preference(text: _Text, _: int) -> dict[str, Any]:
    chosen = _turns(text)
    rejected = [chosen[0], {"role": "assistant", "content": text.sentence()}]
    return {"chosen": chosen, "rejected": rejected}


def _prompted(text: _Text, row: int) -> dict[str, Any]:
    turns = _turns(text)
    return {"prompt": turns[:1], "completion": turns[1:], "label": row % 2 == 0}


def _squad(text: _Text, row: int) -> dict[str, Any]:
    context = text.sentence()
    answer = context.split()[1]
    starts = [context.index(" ") + 1]
    return {
        "id": f"{row}",
        "title": "t",
        "context": context,
        "question": text.sentence(),
        "answers": {"text": [answer], "answer_start": starts},
    }


def _swag(text: _Text, _: int) -> dict[str, Any]:
    endings = {f"ending{number}": text.sentence() for number in range(4)}
    return {"sent1": text.sentence(), "sent2": text.words(1, 1)[0], **endings}


def _labeled(text: _Text, kinds: int, *columns: str) -> dict[str, Any]:
    return {column: text.sentence() for column in columns} | {"label": text.label(kinds)}


_PAIR = ("sentence1", "sentence2")


def _text(text: _Text, _: int) -> dict[str, Any]:
    return {"text": text.sentence()}


def _mrpc(text: _Text, row: int) -> dict[str, Any]:
    return _labeled(text, 2, *_PAIR) | {"idx": row}


def _scored(text: _Text, _: int) -> dict[str, Any]:
    return {column: text.sentence() for column in _PAIR} | {"score": text.score()}


def _ner(text: _Text, _: int) -> dict[str, Any]:
    tokens = text.words(4, 9)
    return {"tokens": tokens, "ner_tags": [text.label(3) for _ in tokens]}


def _conversation(text: _Text, _: int) -> dict[str, Any]:
    return {"messages": _turns(text)}


def _prompt(text: _Text, _: int) -> dict[str, Any]:
    return {"prompt": _turns(text)[:1]}


def _triple(text: _Text, _: int) -> dict[str, Any]:
    return {column: text.sentence() for column in ("prompt", "chosen", "rejected", "reference")}


_BINARY = {"label": _classes("no", "yes")}
_ENTAILMENT = _classes("entailment", "neutral", "contradiction")
_GLUE = {
    "mrpc": (_mrpc, _THREE, _BINARY),
    "sst2": (
        lambda text, row: _labeled(text, 2, "sentence") | {"idx": row},
        _THREE,
        _BINARY,
    ),
}
_WIKITEXT = (_text, _THREE, {})

_DATA: dict[str, Mapping[str, tuple[_Row, _Parts, Mapping[str, Any]]]] = {
    "nyu-mll/glue": _GLUE,
    "glue": _GLUE,
    "Salesforce/wikitext": {"wikitext-2-v1": _WIKITEXT, "wikitext-2-raw-v1": _WIKITEXT},
    "conll2003": {
        "default": (_ner, _THREE, {"ner_tags": List(_classes("O", "B-PER", "I-PER"))}),
    },
    "xnli": {
        "en": (
            lambda text, _: _labeled(text, 3, "premise", "hypothesis"),
            _THREE,
            {"label": _ENTAILMENT},
        ),
    },
    "rajpurkar/squad": {"default": (_squad, ("train", "validation"), {})},
    "swag": {
        "regular": (
            lambda text, row: _swag(text, row) | {"label": text.label(4)},
            ("train", "validation"),
            {"label": _classes("0", "1", "2", "3")},
        ),
    },
    "wmt/wmt16": {
        "ro-en": (
            lambda text, _: {"translation": {"en": text.sentence(), "ro": text.sentence()}},
            _THREE,
            {},
        ),
    },
    "trl-lib/Capybara": {"default": (_conversation, _TRAIN_AND_TEST, {})},
    "trl-lib/ultrafeedback_binarized": {"default": (_preference, _TRAIN_AND_TEST, {})},
    "trl-lib/ultrafeedback-prompt": {"default": (_prompt, _TRAIN_AND_TEST, {})},
    "trl-lib/kto-mix-14k": {"default": (_prompted, _TRAIN_AND_TEST, {})},
    "tpo-alignment/triples": {"default": (_triple, _TRAIN_AND_TEST, {})},
    "yahma/alpaca-cleaned": {
        "default": (
            lambda text, _: {
                "instruction": text.sentence(),
                "input": "",
                "output": text.sentence(),
            },
            ("train",),
            {},
        ),
    },
    "timdettmers/openassistant-guanaco": {"default": (_text, _TRAIN_AND_TEST, {})},
    "meta-math/MetaMathQA-40K": {
        "default": (
            lambda text, _: {"query": text.sentence(), "response": text.sentence()},
            ("train",),
            {},
        ),
    },
    "imdb": {
        "default": (
            lambda text, _: {"query": text.sentence(), "response": text.sentence()},
            _TRAIN_AND_TEST,
            {},
        ),
    },
    "smangrul/amazon_esci": {
        "default": (
            lambda text, row: {
                "query": text.sentence(),
                "product_title": text.sentence(),
                "relevance_label": row % 2,
            },
            ("train", "validation"),
            {},
        ),
    },
    "sentence-transformers/stsb": {"default": (_scored, _THREE, {})},
    "sentence-transformers/all-nli": {
        "pair-class": (
            lambda text, _: _labeled(text, 3, "premise", "hypothesis"),
            _DEV,
            {"label": _ENTAILMENT},
        ),
        "pair-score": (_scored, _DEV, {}),
        "triplet": (
            lambda text, _: {
                column: text.sentence() for column in ("anchor", "positive", "negative")
            },
            _DEV,
            {},
        ),
    },
    "sentence-transformers/quora-duplicates": {
        "pair-class": (lambda text, _: _labeled(text, 2, *_PAIR), ("train",), _BINARY),
    },
    "sentence-transformers/wiki1m-for-simcse": {"default": (_text, ("train",), {})},
    "sentence-transformers/wikipedia-en-sentences": {
        "default": (lambda text, _: {"sentence": text.sentence()}, ("train",), {}),
    },
    "sentence-transformers/gooaq": {
        "default": (
            lambda text, _: {"question": text.sentence(), "answer": text.sentence()},
            ("train",),
            {},
        ),
    },
    "omkar334/trec": {
        "default": (
            lambda text, row: {
                "text": text.sentence(),
                "coarse_label": row % 2,
                "fine_label": row % 4,
            },
            _TRAIN_AND_TEST,
            {"coarse_label": Value("int64"), "fine_label": Value("int64")},
        ),
    },
}
"""For each data set and configuration: what makes a row, the parts, and types of columns that the
rows do not show."""


def _write_data(
    folder: Path, configurations: Mapping[str, tuple[_Row, _Parts, Mapping[str, Any]]]
) -> None:
    """Write a data set: a file for each part of each configuration, and a card that lists them."""
    card = ["---", "configs:"]
    text = _Text()
    for name, (make, parts, types) in configurations.items():
        card += [f"- config_name: {name}", "  data_files:"]
        for part in parts:
            count = _ROWS if part == "train" else _HELD_OUT
            rows = Dataset.from_list([make(text, row) for row in range(count)])
            rows = rows.cast(Features({**rows.features, **types}))
            path = folder / name / f"{part}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows.to_parquet(path)
            card += [f"  - split: {part}", f"    path: {name}/{part}.parquet"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")


def _write_phrases(folder: Path) -> None:
    """Write the files of the FinancialPhraseBank."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _Text()
    for part, count in (("train", _ROWS), ("val", _HELD_OUT)):
        labels = itertools.islice(itertools.cycle(["red", "blue", "green"]), count)
        rows = [{"sentence": text.sentence(), "label": label} for label in labels]
        Dataset.from_list(rows).to_json(folder / f"financial_phrase_bank_{part}.jsonl")
