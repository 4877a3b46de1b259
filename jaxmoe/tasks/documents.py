"""Training documents: items as conversations, small talk, and plain text.

A document is a list of messages (role, text) as in a chat, or a single one of role "text", which
is not a chat but plain running text.
"""

import re
from typing import Literal

from jaxmoe.tasks import smalltalk
from jaxmoe.tasks.draw import Draw
from jaxmoe.tasks.sets import train_item


Role = Literal["system", "user", "assistant", "text"]
Document = list[tuple[Role, str]]

_BEFORE = ("Question: ", "Problem: ", "Solve this: ", "Please help me. ", "Here is a question. ",
           "Can you solve this? ")  # fmt: skip
_AFTER = (" Think step by step.", " Show your working.", "\nAnswer:", " Explain.", " Thanks!",
          "\nLet's think step by step.", " End with #### and the answer.")  # fmt: skip


_SMALL_NUMBER = re.compile(r"(?<![\d$.,])\b(?:[2-9]|1[0-2])\b(?!%|[.,]?\d)")
_NUMBER_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
                 "twelve")  # fmt: skip


def train_document(seed: int, index: int) -> Document:
    """The document at this place of the endless training stream.

    Most are one question and its worked answer; the rest make a chat robust: a system prompt, words
    around the question, several questions in turn, small talk, and the same as plain text.
    """
    draw = Draw(f"document/{seed}/{index}")
    kind = draw.integer(0, 99)
    if kind < 5:
        return [("text", _plain_text(draw, seed, index))]
    document: Document = []
    if draw.chance(0.15):
        document.append(("system", draw.pick(smalltalk.SYSTEM_PROMPTS)))
    if kind < 9:
        return document + _small_talk(draw)
    if kind < 12:
        document += _small_talk(draw)
    num_items = 1 if kind < 92 else 2
    for turn in range(num_items):
        document += _question(draw, seed, index * 4 + turn)
    if kind >= 99:
        document += _small_talk(draw)
    return document


def _question(draw: Draw, seed: int, item_index: int) -> Document:
    item = train_item(seed, item_index)
    question = item.question
    if draw.chance(0.04):
        question = _SMALL_NUMBER.sub(lambda found: _NUMBER_WORDS[int(found[0]) - 2], question)
    if draw.chance(0.04):
        question = question.lower()  # as people type
    if draw.chance(0.1):
        question = draw.pick(_BEFORE) + question
    if draw.chance(0.1):
        question += draw.pick(_AFTER)
    return [("user", question), ("assistant", item.solution)]


def _small_talk(draw: Draw) -> Document:
    questions, answer = draw.pick(smalltalk.PAIRS)
    return [("user", draw.pick(questions)), ("assistant", answer)]


def _plain_text(draw: Draw, seed: int, index: int) -> str:
    """Either an item told straight on, or questions and answers one after the other."""
    if draw.chance(0.4):
        item = train_item(seed, index * 4)
        return f"{item.question}\n{item.solution}"
    items = [train_item(seed, index * 4 + turn) for turn in range(draw.integer(1, 4))]
    return "\n\n".join(f"Question: {item.question}\nAnswer: {item.solution}" for item in items)
