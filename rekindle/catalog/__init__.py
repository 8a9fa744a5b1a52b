"""Facts as data: every row with its source and the date it was read.
Unknown numbers stay blank."""
