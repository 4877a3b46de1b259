"""HTTP: OpenAI's and SGLang's endpoints in front of a serving loop.

`make_app` makes the application. What comes in is checked here (`protocol`), what goes out is
written here; text, tokens and the end of a request are the loop's.
"""

from serving.http.app import make_app
from serving.http.protocol import ModelInfo


__all__ = ["ModelInfo", "make_app"]
