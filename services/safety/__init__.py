"""Input classifier, and output windows beside the stream. Keeps nothing."""
