"""Prompts of exact lengths, of text such as the embedded model has learnt."""

import random

from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.tasks import evaluation_set
from jaxmoe.tokenizer import Tokenizer


class Prompts:
    """Draws them at random: hardly two start alike."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)
        self._tokenizer = Tokenizer.load(EMBEDDED_MODEL)
        self._items = list(evaluation_set("new_seeds"))

    def draw(self, num_tokens: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < num_tokens:
            item = self._rng.choice(self._items)
            ids += self._tokenizer.encode(f"{item.question}\n{item.solution}\n\n")
        return ids[-num_tokens:]
