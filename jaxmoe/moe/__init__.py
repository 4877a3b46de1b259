"""The mixture-of-experts layer: router, dispatchers, experts."""
