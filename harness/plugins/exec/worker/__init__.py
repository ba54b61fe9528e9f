"""What `exec` adds inside of the processes that it starts."""
