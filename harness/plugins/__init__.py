"""What plugs into the harness: each folder is one plug-in, and any of them can be removed."""
