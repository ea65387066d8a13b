"""Benches: open or saturating loads with a fixed shape, medians and ratios, hardware and commit recorded."""
