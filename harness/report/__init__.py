"""Reports: results in, text out. Nothing here prints, decides or writes files."""
