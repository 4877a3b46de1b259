"""Tasks for the embedded model: generated problems, stories and drills, and how they are scored.

Everything is a pure function of its seed and needs only the standard library, so that training
data is made on the fly and the evaluation sets are the same everywhere.
"""

from jaxmoe.tasks.documents import Document, train_document
from jaxmoe.tasks.sets import (
    DOMAINS,
    EVALUATION_SETS,
    Domain,
    Item,
    evaluation_set,
    extract_answer,
    is_correct,
    train_item,
)


__all__ = [
    "DOMAINS",
    "EVALUATION_SETS",
    "Document",
    "Domain",
    "Item",
    "evaluation_set",
    "extract_answer",
    "is_correct",
    "train_document",
    "train_item",
]
