"""Communication behind computation: how a batch is cut, and in which order its parts run."""
