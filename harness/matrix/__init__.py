"""What is asked: cases, their ids, the rules about them, the matrix they are chosen from, injected faults. No torch."""
