"""One call: authorize, prepare, send, stream back, capture, write the journal line."""
