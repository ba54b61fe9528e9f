"""Reference numbers on disk: goldens, tolerances with their evidence, and the sealed file format."""
