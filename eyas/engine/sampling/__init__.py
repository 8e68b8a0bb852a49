"""From logits to tokens: keyed noise, processors, filters, and the sampler that joins them.

A token is the argmax over the surviving ids of log p + G(seed, position, choice, id). Nothing here holds
state: the same row gives the same token alone, in any batch, and as a node of any draft tree.
"""
