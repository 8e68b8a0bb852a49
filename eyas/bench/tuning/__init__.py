"""Which tiles are fastest on a GPU: what `eyas tune` finds and keeps."""
