"""JSON Schema: what a schema says, judged of a value and written as the rules of a grammar."""
