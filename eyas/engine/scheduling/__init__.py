"""The choice of sequences for the next step, the order of the queue, and the life of a request.

Without torch.
"""
