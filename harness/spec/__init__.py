"""What is asked: cases, their ids, the rules about them, and the matrix they are chosen from. No torch."""
