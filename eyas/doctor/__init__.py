"""`eyas doctor`: a running cluster examined, and what is wrong said in sentences."""
