"""Trains the tokenizer on generated text: byte-level BPE with 4096 entries, digits one by one.

    python examples/train_tiny/make_tokenizer.py [FOLDER]

The text is seeded, so the files never differ from one run to the next. Any text comes back as it
was: what the generated text lacks is spelt in bytes.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.tasks import train_document
from jaxmoe.tokenizer import byte_level_alphabet


BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>", PAD)

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("role must be system, user or assistant, got " ~ message.role) }}
    {%- endif %}
    {{- "<|" ~ message.role ~ "|>" ~ message.content ~ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|assistant|>" }}
{%- endif %}
"""

VOCAB_SIZE = 4096
SEED = 1
NUM_DOCUMENTS = 80_000


def documents(count: int) -> Iterator[str]:
    for index in range(count):
        for _, text in train_document(SEED, index):
            yield text


def make_tokenizer(num_documents: int = NUM_DOCUMENTS) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        show_progress=False,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=byte_level_alphabet(),
    )
    tokenizer.train_from_iterator(documents(num_documents), trainer)
    size = tokenizer.get_vocab_size()
    if size != VOCAB_SIZE:
        raise ValueError(f"{num_documents} documents give {size} of {VOCAB_SIZE} entries")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains the tokenizer on generated text.")
    parser.add_argument("folder", nargs="?", type=Path, default=EMBEDDED_MODEL)
    write(make_tokenizer(), parser.parse_args().folder)
