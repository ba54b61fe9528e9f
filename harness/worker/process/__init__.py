"""What belongs to the process of a rank as a whole: its private parts of torch, its settings, its phase."""
