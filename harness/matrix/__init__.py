"""What is asked: cases, their ids, the rules about them, the matrix they are chosen from, planted faults. No torch."""
