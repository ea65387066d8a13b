"""What every service agrees on: words, limits, messages, the token log and the bus."""
