"""What kept runs came to, policy beside policy, and the records of that."""
