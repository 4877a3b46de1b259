"""HTTP: OpenAI's and SGLang's endpoints in front of a serving loop.

`app.make_app` makes the application. What comes in is checked in `protocol`, what goes out is
written in `openai` and `native`; text, tokens and the end of a request are the loop's. `base`,
`errors`, `events` and `server` import no JAX: the router has them too.
"""
