"""Calls joined into threads, and threads into token sequences with mask and logprobs."""
