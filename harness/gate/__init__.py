"""The gate: is a candidate as good as a baseline? Pure over two results of runs; one kind of reason a file."""
