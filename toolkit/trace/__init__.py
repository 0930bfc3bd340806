"""The event table of a recording, and readers and writers of other trace formats."""
