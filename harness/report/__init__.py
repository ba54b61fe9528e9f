"""Reports: turn results into text. Nothing here judges, prints or writes files."""
