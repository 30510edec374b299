"""The verifier, and what keeps an agent from influencing it."""
