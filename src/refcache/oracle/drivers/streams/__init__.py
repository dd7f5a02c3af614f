"""What only streams and events order: the ordering edges, each with a program of its own."""
