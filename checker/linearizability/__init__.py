"""Is there one order of all operations, within their real-time bounds, that the model allows?

``engine`` chooses between the general search and near-linear special cases, and records why.
"""
