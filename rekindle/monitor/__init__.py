"""What serves, watched: the log of predictions, and whether they are still like what was judged."""
