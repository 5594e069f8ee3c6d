"""Is there one order of all operations, within their real-time bounds, that the model allows?

``engine`` chooses among the general search and the near-linear special cases and says why.
"""
