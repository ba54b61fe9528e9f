"""The command line: one file per command. Options, words on stdout and exit codes; the work is done below."""
