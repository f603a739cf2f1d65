"""Arguments and lists of the command line."""
