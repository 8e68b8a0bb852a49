"""A draft worker: sequences that other engines decode, and drafts for their commits."""
