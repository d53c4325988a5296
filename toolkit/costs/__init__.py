"""What forward passes cost: seconds by tokens, batch and context, and energy."""
