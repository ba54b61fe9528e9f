"""The rank side of conformance: runs operators on distributed tensors and says what came out and what it cost."""
