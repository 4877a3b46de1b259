"""Log-probabilities as OpenAI's two endpoints and SGLang's write them."""

from collections.abc import Sequence
from typing import Any

from jaxmoe.tokenizer import Tokenizer
from serving.request import TokenLogprob


# JSON has no infinity; a token this unlikely is never drawn.
MIN_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    return max(float(logprob), MIN_LOGPROB)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; U+FFFD where its bytes are only a part of a character."""
    return tokenizer.id_to_bytes(token_id).decode("utf-8", "replace")


def token_key(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as a string that no other has, as OpenAI's completions write parts of characters."""
    data = tokenizer.id_to_bytes(token_id)
    if not data:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """The `logprobs` of one choice of `/v1/completions`, piece by piece: `text_offset` goes on from
    one piece to the next and counts the characters of the choice's own text (with echo, from the
    prompt's start)."""

    def __init__(self, tokenizer: Tokenizer, num_top: int):
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._text = tokenizer.text_decoder()
        self._offset = 0

    def piece(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._text.push(token.token_id))
        return {
            "tokens": [token_key(self._tokenizer, token.token_id) for token in tokens],
            "token_logprobs": [
                None if token.logprob is None else finite(token.logprob) for token in tokens
            ],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float] | None:
        """The likeliest tokens, and the one that was taken if it is not among them."""
        if token.logprob is None:
            return None
        pairs = [*token.top[: self._num_top], (token.token_id, token.logprob)]
        return {
            token_key(self._tokenizer, token_id): finite(logprob)
            for token_id, logprob in dict(pairs).items()
        }


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], num_top: int
) -> dict[str, Any]:
    """The `logprobs` of a choice of `/v1/chat/completions`."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.id_to_bytes(token_id)),
        }

    content = []
    for token in tokens:
        assert token.logprob is not None  # only a prompt's first token has none
        top = [entry(token_id, logprob) for token_id, logprob in token.top[:num_top]]
        content.append({**entry(token.token_id, token.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def native_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[TokenLogprob]
) -> list[tuple[float | None, int, str | None]]:
    """SGLang's (logprob, token id, text) triples; without a tokenizer the text is None."""
    return [
        (
            None if token.logprob is None else finite(token.logprob),
            token.token_id,
            None if tokenizer is None else token_text(tokenizer, token.token_id),
        )
        for token in tokens
    ]


def native_top_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[TokenLogprob], num_top: int
) -> list[Any]:
    """The likeliest tokens of each place as such triples; None for a prompt's first token."""
    return [
        None
        if token.logprob is None
        else native_logprobs(
            tokenizer, [TokenLogprob(token_id, value) for token_id, value in token.top[:num_top]]
        )
        for token in tokens
    ]
