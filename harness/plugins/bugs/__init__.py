"""From a bug report to a case: import, reproduce, shrink, export and bisect it."""
