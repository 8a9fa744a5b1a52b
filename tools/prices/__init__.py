"""Asks AWS, Google and Azure what their machines cost, and writes a file of prices that
`rekindle plan --prices FILE` reads: `python -m tools.prices` (docs/prices.md)."""
