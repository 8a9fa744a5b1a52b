"""Asks AWS, Google and Azure what their machines cost, and writes a file of prices that
`rekindle plan --prices FILE` reads: `python -m tools.prices` (docs/prices.md).

It is a tool of the repository and not a verb of rekindle, because a plan asks no service:
it is made with the shipped prices, with `prices.yaml` in the home or with what `--prices`
names, however these were written. As a verb it was 570 lines of the library with clients
of three clouds; a verb whose code is elsewhere would be half there in a wheel. The cost:
a user of the wheel writes such a file by hand, or gets the repository."""
