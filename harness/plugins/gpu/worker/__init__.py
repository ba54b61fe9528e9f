"""What runs in ranks."""
