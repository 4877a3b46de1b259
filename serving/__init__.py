"""The host side: requests, pages and HTTP. The only package with threads and lasting state."""
