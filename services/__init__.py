"""The services. Each stands alone and never imports another."""
