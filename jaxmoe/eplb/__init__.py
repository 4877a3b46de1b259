"""Expert load: where experts are placed, replicated and why."""
