"""What a rank reads of a tensor: where its part is in the whole, its bits, sums over ranks."""
