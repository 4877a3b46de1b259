"""A request's text as it grows: whole characters, and nothing of a stop string.

The tokens of one sequence go in one at a time; what comes out, put together, is the text of all of
them decoded at once, up to the stop string that is completed first. How the text is cut into tokens
never changes it.
"""

from jaxmoe.tokenizer import Tokenizer


class TextStream:
    """One sequence's text.

    Attributes:
      matched: the stop string that was found; the text from it on is dropped. Of several, the one
        completed first; of those completed by the same character, the longest.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), skip_special_tokens: bool = True
    ):
        self.matched: str | None = None
        self._decoder = tokenizer.text_decoder(skip_special_tokens)
        self._stop = stop
        self._held = ""  # the beginning of what may become a stop string

    def push(self, token_id: int) -> str:
        """Add a token; the text that is certain now and was not before."""
        if self.matched is not None:
            return ""
        return self._take(self._decoder.push(token_id))

    def finish(self) -> str:
        """The text still held back, once no more tokens come. It can complete a stop string."""
        if self.matched is not None:
            return ""
        text = self._take(self._decoder.finish())
        if self.matched is None:
            text += self._held
        self._held = ""
        return text

    def _take(self, new: str) -> str:
        if not self._stop or not new:
            return new
        text = self._held + new
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            return text[:start]
        keep = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[keep:]
        return text[:keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
