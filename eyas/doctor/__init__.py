"""`eyas doctor`: a running cluster examined, and what is wrong said in sentences.

`eyas doctor head` is `eyas.train.doctor`, `eyas doctor determinism` is `eyas.evals.determinism`.
"""
