"""`eyas quantize`: a model's folder in fewer bits, each matrix rounded to the nearest numbers of a format."""
