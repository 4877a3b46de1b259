"""Writes the embedded model's tokenizer: the 256 bytes, then the special tokens.

    python jaxmoe/assets/make_tokenizer.py [FOLDER]

It is made from nothing, so the files never differ from one run to the next.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxmoe.tokenizer import byte_level_alphabet


BEGIN, END = "<|begin|>", "<|end|>"
SPECIAL_TOKENS = (BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>")

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


def make_tokenizer() -> Tokenizer:
    vocab = {char: byte for byte, char in enumerate(byte_level_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    begin_id = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin_id)]
    )
    return tokenizer


def main(folder: Path) -> None:
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
