"""The models: weights, attention, sampling. The only place that imports torch."""
