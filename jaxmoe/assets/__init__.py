"""The embedded model: what runs when no model is named. A complete Hugging Face directory.

`examples/train_tiny` made it; the README's model card says what it can do.
"""

from pathlib import Path


EMBEDDED_MODEL = Path(__file__).parent
EMBEDDED_MODEL_NAME = "jaxmoe-embedded"
