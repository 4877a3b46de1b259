"""Expert placement: which physical slot holds which expert."""
