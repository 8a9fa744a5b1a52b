"""Whether what a model is given, and how it answers, is still like what it was judged on.

log.py reads the predictions that servers logged, labels.py the labels that arrived for
them, and verdict.py says what they tell."""
