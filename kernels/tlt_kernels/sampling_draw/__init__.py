"""The policy's draw: temperature, filters, noise, argmax and logprobs in one pass over the vocabulary."""
